"""The demo's prompts: every template of a family crossed with every topic of that family.

`split()` gives the training prompts and the held-out prompts. A held-out prompt is a new
combination: its template and its topic each occur in the training prompts, never together.
Standard library only; nothing here is random beyond one seeded shuffle.
"""

import random
from dataclasses import dataclass

SEED = 20
NUM_TRAIN = 2220
NUM_HELDOUT = 80


@dataclass(frozen=True)
class Prompt:
    """One question. `prompt_id` is FAMILY-TEMPLATE-TOPIC, e.g. `subject-03-17`."""

    prompt_id: str
    text: str

    @property
    def template_key(self) -> str:
        """Family and template number, e.g. `subject-03`."""
        return self.prompt_id.rpartition("-")[0]

    @property
    def topic_key(self) -> str:
        """Family and topic number, e.g. `subject/17`."""
        family, _, topic = self.prompt_id.split("-")
        return f"{family}/{topic}"


@dataclass(frozen=True)
class Family:
    """Templates and topics that fit each other: any topic reads well in any template."""

    name: str
    templates: tuple[str, ...]
    topics: tuple[str, ...]

    def prompts(self) -> list[Prompt]:
        """The whole product, template by template."""
        return [
            Prompt(f"{self.name}-{row:02d}-{column:02d}", template.format(topic=topic))
            for row, template in enumerate(self.templates)
            for column, topic in enumerate(self.topics)
        ]


SUBJECT = Family(
    name="subject",
    templates=(
        "What is {topic}?",
        "Explain {topic} in simple words.",
        "Give me three facts about {topic}.",
        "Why does {topic} matter?",
        "Write a short paragraph about {topic}.",
        "How would you explain {topic} to a child?",
        "What should a beginner know about {topic}?",
        "Summarize {topic} in two sentences.",
        "Write a short poem about {topic}.",
        "List five words that have to do with {topic}.",
        "Suggest a title for an essay about {topic} and say why it fits.",
        "Write the first paragraph of a blog post about {topic}.",
        "What is a common misunderstanding about {topic}?",
        "Write one quiz question about {topic} and give its answer.",
        "How does {topic} affect everyday life?",
        "What are the most important parts of {topic}?",
        "Tell me something surprising about {topic}.",
        "Make a short outline for a talk about {topic}.",
        "What questions do people often ask about {topic}?",
        "Describe {topic} with an example.",
    ),
    topics=(
        "photosynthesis",
        "gravity",
        "the water cycle",
        "climate change",
        "electricity",
        "the human heart",
        "sleep",
        "the internet",
        "recycling",
        "democracy",
        "the solar system",
        "a rainbow",
        "evolution",
        "bread",
        "coffee",
        "music",
        "the ocean",
        "a volcano",
        "money",
        "friendship",
        "the printing press",
        "the Roman Empire",
        "artificial intelligence",
        "a healthy diet",
        "exercise",
        "solar energy",
        "the moon",
        "weather forecasting",
        "language",
        "memory",
        "a computer network",
        "the immune system",
        "a budget",
        "chess",
        "public transport",
        "a rainforest",
        "the desert",
        "a library",
        "honesty",
        "the seasons",
        "magnetism",
        "sound",
        "light",
        "the human brain",
        "a compass",
        "a bridge",
        "open source software",
        "encryption",
        "the food chain",
        "tea",
    ),
)

ACTIVITY = Family(
    name="activity",
    templates=(
        "How do I get started with {topic}?",
        "Give me three tips for {topic}.",
        "What do I need for {topic}?",
        "What are the benefits of {topic}?",
        "Write a short message that invites a friend to try {topic}.",
        "Make a simple one-week plan for {topic}.",
        "What mistakes should I avoid when {topic}?",
        "Why do many people enjoy {topic}?",
        "Write a short story about someone who discovers {topic}.",
        "How can I find more time for {topic}?",
        "Explain step by step how to begin {topic}.",
        "What makes {topic} difficult, and how can I make it easier?",
        "Write a cheerful slogan for a club about {topic}.",
        "How can a family enjoy {topic} together?",
    ),
    topics=(
        "baking bread",
        "learning to swim",
        "growing tomatoes",
        "painting with watercolors",
        "playing the guitar",
        "running outdoors",
        "keeping a diary",
        "cooking vegetable soup",
        "learning a new language",
        "riding a bicycle",
        "taking photographs",
        "camping in the forest",
        "reading before bed",
        "practicing yoga",
        "writing short stories",
        "walking a dog",
        "saving money",
        "public speaking",
        "knitting a scarf",
        "playing chess",
        "cleaning the kitchen",
        "studying for an exam",
        "working from home",
        "planning a birthday party",
        "learning to program",
        "singing in a choir",
        "meditating in the morning",
        "hiking in the mountains",
        "repairing old furniture",
        "watching birds",
    ),
)

REWRITE = Family(
    name="rewrite",
    templates=(
        'Rewrite this sentence so that it sounds more polite: "{topic}"',
        'Make this sentence shorter: "{topic}"',
        'Rewrite this sentence in a formal tone: "{topic}"',
        'Rewrite this sentence in a cheerful tone: "{topic}"',
        'Turn this sentence into a question: "{topic}"',
        'Say the same thing in other words: "{topic}"',
        'Add one more sentence after this one: "{topic}"',
        'Write a friendly reply to this message: "{topic}"',
        'What is the mood of this sentence? "{topic}"',
        'Turn this sentence into the start of a short story: "{topic}"',
        'List the nouns in this sentence: "{topic}"',
        'Write an email that begins with this sentence: "{topic}"',
    ),
    topics=(
        "The train is late again and nobody told us.",
        "Send me the report today.",
        "I forgot my umbrella and got wet.",
        "The new cafe on the corner has great cakes.",
        "We need to talk about the garden.",
        "My computer stopped working this morning.",
        "The children are playing in the park.",
        "Please close the window.",
        "I really liked the book you gave me.",
        "The meeting was long and not useful.",
        "Our neighbor has a very loud dog.",
        "She found an old letter in the attic.",
        "The soup is too salty.",
        "I want to learn how to dance.",
        "The shop does not open on Sunday.",
        "He lost his keys on the beach.",
        "The teacher explained the lesson twice.",
        "It is cold outside, so take a coat.",
        "We had a wonderful time at the lake.",
        "The package has not arrived yet.",
        "I cannot come to dinner tomorrow.",
        "The old clock in the hall has stopped.",
        "You should try the blue one.",
        "The cat is asleep on my keyboard.",
    ),
)

COMPARE = Family(
    name="compare",
    templates=(
        "What is the difference between {topic}?",
        "Compare {topic} in a few sentences.",
        "What do {topic} have in common?",
        "Give one advantage of each: {topic}.",
        "How would you help a friend choose between {topic}?",
        "Explain to a child how {topic} differ.",
        "Write a short dialogue between {topic}.",
    ),
    topics=(
        "a cat and a dog",
        "a lake and a river",
        "tea and coffee",
        "a bicycle and a car",
        "a book and a film",
        "the sun and the moon",
        "summer and winter",
        "a city and a village",
        "a piano and a violin",
        "a frog and a toad",
        "butter and olive oil",
        "an apple and an orange",
        "a train and a plane",
        "a novel and a poem",
        "wood and metal",
        "a doctor and a nurse",
        "a laptop and a tablet",
        "a virus and a bacterium",
        "a comet and an asteroid",
        "a moth and a butterfly",
        "a lawyer and a judge",
        "football and tennis",
        "a mountain and a hill",
        "bread and rice",
        "a letter and an email",
        "a painter and a photographer",
        "gold and silver",
        "a whale and a shark",
        "a teacher and a student",
        "a clock and a calendar",
    ),
)

CODE = Family(
    name="code",
    templates=(
        "Write a Python function that {topic}.",
        "Write a JavaScript function that {topic}.",
        "Write a Python function with a docstring that {topic}.",
        "Explain in plain words how a program that {topic} would work.",
        "Suggest a good name for a function that {topic}, and say why.",
        "Write a one-line comment for a function that {topic}.",
        "What should I test in a function that {topic}?",
        "Write a short Python example that calls a function that {topic}.",
    ),
    topics=(
        "reverses a string",
        "finds the largest number in a list",
        "counts the words in a text",
        "removes duplicates from a list",
        "checks whether a word is a palindrome",
        "reads a text file line by line",
        "sorts a list of names",
        "merges two dictionaries",
        "turns a list into a string",
        "counts the vowels in a word",
        "finds the longest word in a sentence",
        "checks whether a list is empty",
        "converts text to upper case",
        "returns the last item of a list",
        "filters out short words",
        "checks whether a file exists",
        "splits a sentence into words",
        "prints each item of a list",
        "swaps two variables",
        "checks whether a string contains a letter",
        "picks a random item from a list",
        "replaces spaces with dashes",
        "finds common items in two lists",
        "saves a list to a file",
        "checks whether a password is long enough",
        "returns the first letter of each word",
        "removes spaces from the ends of a string",
        "groups words by their first letter",
        "prints the current date",
        "counts how often each letter occurs",
    ),
)

WORD = Family(
    name="word",
    templates=(
        'Define the word "{topic}".',
        'Use the word "{topic}" in a sentence.',
        'Give me two words that mean the same as "{topic}".',
        'What is the opposite of "{topic}"?',
        'Explain the word "{topic}" to someone who is learning English.',
        'Write a two-line rhyme that contains the word "{topic}".',
    ),
    topics=(
        "brave",
        "curious",
        "gentle",
        "ancient",
        "fragile",
        "generous",
        "silent",
        "bright",
        "careful",
        "clever",
        "lonely",
        "patient",
        "rapid",
        "simple",
        "stubborn",
        "tiny",
        "useful",
        "warm",
        "wise",
        "grateful",
        "humble",
        "ordinary",
        "polite",
        "proud",
        "quiet",
        "rough",
        "serious",
        "smooth",
        "sudden",
        "tired",
        "vivid",
        "weak",
        "wealthy",
        "eager",
        "calm",
        "honest",
    ),
)

FAMILIES = (SUBJECT, ACTIVITY, REWRITE, COMPARE, CODE, WORD)


def all_prompts() -> list[Prompt]:
    """Every combination of every family, in the order of `FAMILIES`."""
    return [prompt for family in FAMILIES for prompt in family.prompts()]


def split() -> tuple[list[Prompt], list[Prompt]]:
    """The training prompts (`NUM_TRAIN`) and the held-out prompts (`NUM_HELDOUT`).

    The shuffle sorts by `random.Random(SEED).random()`, whose sequence Python keeps the same
    across versions (`random.shuffle` gives no such promise).
    """
    generator = random.Random(SEED)  # noqa: S311 - a fixed order is wanted, not secrecy
    shuffled = sorted(all_prompts(), key=lambda _: generator.random())
    return shuffled[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN], shuffled[:NUM_HELDOUT]
