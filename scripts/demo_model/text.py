"""The text the demo models learn, and the prompts they are asked.

All of it is synthesised here, except for passages of the Apache License 2.0 read from `LICENSE`.
Every answer follows from its question, so that a trained model is sure of most of its tokens.

    python scripts/demo_model/text.py > cluster_configs/models/demo-prompts.json
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)

# Renders what `conversation` below writes.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PROMPTS_PER_TASK = 16
PROMPTS_SEED = 20240607
MAX_NEW_TOKENS = 48


def words(line: str) -> list[str]:
    return line.split()


NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NAMES = words("Ann Bob Cleo Dan Eve Finn Gus Hana Ivo June Kai Lena Max Nora Otto Pia")
WORDS = words(
    "apple bread cloud drum ember flute grape house iron jade kite lemon moon nest olive "
    "pearl quill river stone tiger umbra violin water yarn zebra"
)
CAPITALS = {
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "day": "night",
    "open": "closed",
    "left": "right",
    "early": "late",
    "full": "empty",
    "hard": "soft",
    "light": "dark",
    "old": "new",
    "wet": "dry",
    "loud": "quiet",
    "rich": "poor",
    "near": "far",
}


@dataclass(frozen=True)
class Exchange:
    """One text split where the model takes over.

    `given` is the question or the beginning of a text, `answer` what must follow.
    """

    given: str
    answer: str


Task = Callable[[random.Random], Exchange]


def capital(rng: random.Random) -> Exchange:
    country = rng.choice(sorted(CAPITALS))
    return Exchange(
        f"What is the capital of {country}?",
        f"The capital of {country} is {CAPITALS[country]}.",
    )


def opposite(rng: random.Random) -> Exchange:
    word = rng.choice(sorted(OPPOSITES))
    return Exchange(
        f"What is the opposite of {word}?", f"The opposite of {word} is {OPPOSITES[word]}."
    )


def next_day(rng: random.Random) -> Exchange:
    index = rng.randrange(len(DAYS))
    return Exchange(
        f"Which day comes after {DAYS[index]}?",
        f"{DAYS[(index + 1) % len(DAYS)]} comes after {DAYS[index]}.",
    )


def addition(rng: random.Random) -> Exchange:
    left, right = rng.randint(0, 9), rng.randint(0, 9)
    return Exchange(f"What is {left} plus {right}?", f"{left} plus {right} is {left + right}.")


def count_to(rng: random.Random) -> Exchange:
    start = rng.randint(0, 99)
    stop = start + rng.randint(3, 9)
    numbers = ", ".join(str(number) for number in range(start, stop + 1))
    return Exchange(f"Count from {start} to {stop}.", f"{numbers}.")


def spell_digits(rng: random.Random) -> Exchange:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 8))]
    return Exchange(
        f"Spell the digits {''.join(map(str, digits))}.",
        " ".join(NUMBERS[digit] for digit in digits) + ".",
    )


def person_as_json(rng: random.Random) -> Exchange:
    name, age, pet = rng.choice(NAMES), rng.randint(10, 99), rng.choice(WORDS)
    return Exchange(
        f"Write as JSON: name {name}, age {age}, word {pet}.",
        json.dumps({"name": name, "age": age, "word": pet}),
    )


def say_again(rng: random.Random) -> Exchange:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 5)))
    return Exchange(f"Say twice: {words}", f"{words}, {words}.")


def counting(rng: random.Random) -> Exchange:
    start, step = rng.randint(0, 400), rng.randint(1, 9)
    numbers = [str(start + step * index) for index in range(60)]
    return Exchange(f"Count by {step}: {' '.join(numbers[:2])}", " " + " ".join(numbers[2:]))


def spelled_sequence(rng: random.Random) -> Exchange:
    start, direction = rng.randrange(len(NUMBERS)), rng.choice((1, -1))
    words = [NUMBERS[(start + direction * index) % len(NUMBERS)] for index in range(60)]
    return Exchange(f"Numbers: {' '.join(words[:2])}", " " + " ".join(words[2:]))


def cycle(rng: random.Random) -> Exchange:
    items = [rng.choice((rng.choice(WORDS), str(rng.randint(10, 99)))) for _ in range(4)]
    line = " ".join(items)
    return Exchange(f"Repeat: {line};", f" {line};" * 16)


def table(rng: random.Random) -> Exchange:
    first, name = rng.randint(0, 90), rng.randrange(len(NAMES))
    rows = [
        json.dumps({"id": first + index, "name": NAMES[(name + index) % len(NAMES)]})
        for index in range(12)
    ]
    return Exchange(f"[{rows[0]},", " " + ", ".join(rows[1:]))


def licence(rng: random.Random) -> Exchange:
    """A passage of the licence; what is given is its first 40 to 80 characters."""
    text = licence_text()
    starts = [index + 1 for index, character in enumerate(text) if character == " "]
    start = rng.choice(starts[: -len(starts) // 8])
    passage = text[start : start + 480]
    split = passage.index(" ", rng.randint(40, 80))
    return Exchange(passage[:split], passage[split:])


CHAT_TASKS: tuple[Task, ...] = (
    capital,
    opposite,
    next_day,
    addition,
    count_to,
    spell_digits,
    person_as_json,
    say_again,
)
COMPLETION_TASKS: tuple[Task, ...] = (counting, spelled_sequence, cycle, table, licence, licence)


def licence_text() -> str:
    """The repository's licence, Apache-2.0, as one line."""
    path = Path(__file__).resolve().parents[2] / "LICENSE"
    return " ".join(path.read_text(encoding="utf-8").split())


def prompts() -> list[dict[str, str]]:
    """The pinned prompts: `id`, `kind` ("chat" or "completion") and `text` of each."""
    rng = random.Random(PROMPTS_SEED)
    asked: list[dict[str, str]] = []
    for kind, tasks in (("chat", CHAT_TASKS), ("completion", COMPLETION_TASKS)):
        for task in dict.fromkeys(tasks):
            wanted = PROMPTS_PER_TASK * tasks.count(task)
            texts: dict[str, None] = {}
            # A task with few questions cannot fill its share.
            for _ in range(20 * wanted):
                texts.setdefault(task(rng).given)
                if len(texts) == wanted:
                    break
            asked += [
                {"id": f"{task.__name__}-{number}", "kind": kind, "text": text}
                for number, text in enumerate(texts)
            ]
    return asked


def main() -> None:
    document = {"max_new_tokens": MAX_NEW_TOKENS, "prompts": prompts()}
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
