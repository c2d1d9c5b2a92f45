"""Write a model that fastgen-jax can find as a Hugging Face folder in float32, the one that every contestant loads.

.venv/bin/python scripts/peers/export_model.py smollm2-135m .venv-peers/model
"""

import argparse
import json
from pathlib import Path

from safetensors.numpy import save_file

from fastgen_jax import checkpoint

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}


def export(name: str, folder: Path) -> None:
    """Quantised tensors become float32, so that no contestant starts from other numbers than the rest."""
    found = checkpoint.resolve(name)
    source = found.open()
    tied = found.hf_config["tie_word_embeddings"]
    names = [name for name in source.names() if not (tied and name == "lm_head.weight")]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: source.read(name).astype("float32") for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    architecture = ARCHITECTURES[found.hf_config["model_type"]]
    config = found.hf_config | {"architectures": [architecture], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(found.generation_config, indent=1))
    found.tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what Engine.from_pretrained takes")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    export(args.model, args.folder)


if __name__ == "__main__":
    main()
