"""What a benchmark asks for: requests of seeded lengths, their prompts, and when they arrive.

Lengths are those of the FastGen benchmark (arXiv 2401.08671): Normal(mean, 0.3 mean), clipped.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

RELATIVE_STD = 0.3
TOO_LONG = 1 << 31
CORPUS_WORDS = 20_000
CORPUS_TOKENS = 1 << 16
RANDOM_TOKEN_IDS = range(300, 1000)
"""Ordinary tokens of every vocabulary in use: special and byte tokens lie below."""

WORDS = """
a about after again air all along also always an and animal answer any apple around as ask at autumn away back bake
ball basket be bear because before begin below beside best better between big bird black blue boat book both bread
bridge bright bring brother build but buy by call candle carry castle cat change child circle city clear climb close
cloud coat cold come corner could count country cover cross dance dark day deep door down draw dream drink drive dry
each early earth east easy eat egg end enough evening every eye face fall family far farm fast father feather few
field find fire first fish five floor flower fly follow food foot forest four fresh friend from garden gate gather
gave get gift give glass go gold good grass great green ground grow half hand happy hard harvest have hear heart heavy
help here high hill hold home honey horse hour house how hundred ice idea in iron island join journey jump just keep
key kind king kitchen knot know lake lamp land language large last late laugh lead leaf learn leave left letter light
line listen little live long look lost loud low machine make many map market may measure meet middle milk mind mirror
moment month moon more morning most mother mountain move much music must name near need never new next night nine
north not note nothing now number ocean of off often old on once one only open or orange order other our out over own
page paint paper part path people picture piece place plain plant play point poor press pull push question quick quiet
rain reach read ready red remember rest rich ride right ring rise river road rock roof room root rope round run sail
salt same sand say school sea season second seed seem send seven shade shape sharp ship shoe shop short shoulder show
side silver simple since sing sister sit six sky sleep slow small smoke snow so soft some song soon sound south space
speak spring square stand star start station stay steel step still stone stop storm story straight strange stream
street strong sugar summer sun sure sweet swim table take talk tall tell ten than that the their them then there these
thing think this though thought thousand thread three through ticket time to together tomorrow too top tower town
train travel tree true try turn twelve two under until up valley very village voice wait walk wall want warm wash
watch water wave way we weather week well west wheel when where which while white who why wide will wind window winter
with without wood word work world would write yard year yellow yes yesterday young
"""


@dataclass(frozen=True)
class Request:
    """One request of a benchmark: greedy, EOS ignored, so that exactly `max_tokens` tokens come back.

    arrival: seconds after the start of the run, for an open loop.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Normal(mean, 0.3 mean), rounded down and clipped to 1 ... cap."""

    mean: float
    cap: int

    def __post_init__(self) -> None:
        check_mean(self.mean)
        if self.cap < 1:
            raise ValueError(f"a longest length of {self.cap} tokens is too short; it must be at least 1")

    def sample(self, rng: random.Random) -> int:
        return min(max(int(rng.gauss(self.mean, RELATIVE_STD * self.mean)), 1), self.cap)


def check_mean(mean: float) -> None:
    """ValueError for a mean length that no tokens have."""
    if not mean >= 1:
        raise ValueError(f"a mean length of {mean} tokens is too short; it must be at least 1")
    if mean >= TOO_LONG:
        raise ValueError(f"a mean length of {mean} tokens is too long; it must be below {TOO_LONG}")


def make_requests(
    num_requests: int,
    prompt: Lengths,
    output: Lengths,
    corpus: Sequence[int],
    *,
    seed: int = 0,
    shared_prefix: int = 0,
) -> list[Request]:
    """`num_requests` requests of random lengths, with prompts of `make_prompts`."""
    if num_requests < 1:
        raise ValueError(f"{num_requests} requests are too few; it takes at least 1")
    rng = random.Random(seed)
    lengths = [(prompt.sample(rng), output.sample(rng)) for _ in range(num_requests)]
    prompts = make_prompts([length for length, _ in lengths], corpus, seed=seed, shared_prefix=shared_prefix)
    return [Request(token_ids, length) for token_ids, (_, length) in zip(prompts, lengths, strict=True)]


def make_prompts(
    lengths: Sequence[int], corpus: Sequence[int], *, seed: int = 0, shared_prefix: int = 0
) -> list[list[int]]:
    """Prompts of these lengths, cut from `corpus`, token ids that are read in a circle.

    They begin in different places of it until all have been used, and neighbours with different tokens, so that
    neighbours share no prefix. shared_prefix: so many tokens, the same for all, stand in front of each prompt,
    on top of its length.
    ValueError if the corpus has no two different tokens.
    """
    if shared_prefix < 0:
        raise ValueError(f"a shared prefix of {shared_prefix} tokens is impossible; it must be at least 0")
    if len(set(corpus)) < 2:
        raise ValueError(f"a text of {len(set(corpus))} different tokens cannot give prompts; it takes at least 2")
    prefix = _circle(corpus, 0, shared_prefix)
    starts = _starts(corpus, random.Random(seed))
    return [prefix + _circle(corpus, start, length) for start, length in zip(starts, lengths, strict=False)]


def _starts(corpus: Sequence[int], rng: random.Random) -> Iterator[int]:
    """Places of the corpus in random order, round after round, no two neighbours on the same token."""
    places = list(range(len(corpus)))
    previous = None
    while True:
        rng.shuffle(places)
        for place in places:
            if corpus[place] != previous:
                previous = corpus[place]
                yield place


def _circle(corpus: Sequence[int], start: int, length: int) -> list[int]:
    return [corpus[(start + i) % len(corpus)] for i in range(length)]


def poisson(requests: Sequence[Request], rate: float, *, seed: int = 0) -> list[Request]:
    """The same requests arriving as a Poisson process of `rate` requests/s; the first at 0."""
    if not rate > 0:
        raise ValueError(f"a rate of {rate} requests/s is impossible; it must be above 0")
    rng = random.Random(seed)
    arrival, arriving = 0.0, []
    for request in requests:
        arriving.append(replace(request, arrival=arrival))
        arrival += rng.expovariate(rate)
    return arriving


def word_salad(num_words: int = CORPUS_WORDS, *, seed: int = 0) -> str:
    """Sentences of common English words in random order; the same for the same seed, on every machine."""
    rng = random.Random(seed)
    words = WORDS.split()
    sentences = []
    while num_words > 0:
        sentence = rng.choices(words, k=min(rng.randint(4, 16), num_words))
        num_words -= len(sentence)
        sentences.append(" ".join(sentence).capitalize() + ".")
    return " ".join(sentences)


def random_corpus(*, token_ids: range = RANDOM_TOKEN_IDS, seed: int = 0) -> list[int]:
    """Random token ids, for a target without a tokenizer."""
    return random.Random(seed).choices(token_ids, k=CORPUS_TOKENS)
