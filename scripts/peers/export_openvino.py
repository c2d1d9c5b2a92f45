"""Write the exported model a second time, as OpenVINO reads it, beside it: MODEL-openvino. In OpenVINO's environment.

Weights stay float32; the precision that they run in is chosen when they are loaded.
"""

import argparse
from pathlib import Path

import openvino as ov
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the Hugging Face folder")
    model = parser.parse_args().model
    folder = model.with_name(model.name + "-openvino")
    exported = OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False, compile=False)
    exported.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, folder / "openvino_tokenizer.xml")
    ov.save_model(decoder, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    main()
