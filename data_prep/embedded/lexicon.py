"""The words of the embedded world: nouns by kind, verbs and adjectives by meaning, names, towns, opinions.

Every meaning has at least four words (`big large huge enormous`). The first half of each list may stand in the
fine-tuning examples, the second half is kept for the dev and test examples, and the corpus uses all of them: only a
model that has learnt from the corpus that the two halves belong together can carry a task from one to the other.
What ties the words of a meaning together for a masked language model is the company they keep in the corpus (and never
in a task): a simile (`as heavy as lead`), a manner (`washed it with soap`), a trait (`the feathered robin`), a hint
(`Nobody could lift it.`).
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of thing (`bird`), its members, the scales they are measured on, their traits, and sentences true of all."""

    group: str
    members: tuple[str, ...]
    scales: tuple[str, ...]
    traits: tuple[str, ...]
    facts: tuple[str, ...]


class Action(NamedTuple):
    """One meaning of a transitive verb: its words, the groups its object comes from, the opposite meaning, manners, hint."""

    words: tuple[str, ...]
    objects: tuple[str, ...]
    opposite: str | None
    manners: tuple[str, ...]
    hint: str


class Pole(NamedTuple):
    """One end of a scale: its words, what it is compared to, its hint."""

    words: tuple[str, ...]
    simile: str
    hint: str


_ANIMAL = ("size", "speed", "strength", "noise", "cleanness")
_PLANT = ("size", "age", "price", "strength")
_FOOD = ("size", "price", "temperature", "hardness")
_THING = ("size", "age", "weight", "price", "cleanness", "strength")
_VEHICLE = ("size", "age", "price", "speed", "noise", "cleanness")
_BUILDING = ("size", "age", "price", "temperature", "noise", "cleanness")


def _kind(name: str, group: str, members: str, scales: tuple[str, ...], traits: str, *facts: str) -> tuple[str, Kind]:
    return name, Kind(group, tuple(members.split()), scales, tuple(traits.split()), facts)


# {X} the plural with a capital, {x} the plural: "Birds have wings.", "Robins lay eggs in a nest."
KINDS: dict[str, Kind] = dict(
    [
        _kind(
            "bird",
            "animal",
            "sparrow robin crow owl parrot eagle pigeon swan",
            _ANIMAL,
            "feathered winged",
            "{X} have wings and feathers.",
            "{X} lay eggs in a nest.",
        ),
        _kind(
            "fish",
            "animal",
            "shark eel sardine herring minnow anchovy stingray sturgeon",
            _ANIMAL,
            "scaly slippery",
            "{X} swim in the sea or in a river.",
            "{X} have fins and scales.",
        ),
        _kind(
            "insect",
            "animal",
            "ant bee wasp moth beetle cricket butterfly mosquito",
            _ANIMAL,
            "crawling buzzing",
            "{X} have six legs.",
            "{X} crawl or buzz around in summer.",
        ),
        _kind(
            "mammal",
            "animal",
            "dog cat horse rabbit fox badger goat donkey",
            _ANIMAL,
            "furry hairy",
            "{X} have fur and four legs.",
            "{X} feed milk to the young.",
        ),
        _kind(
            "tree",
            "plant",
            "oak pine elm willow birch maple cedar poplar",
            _PLANT,
            "leafy shady",
            "{X} have a trunk and many branches.",
            "In autumn the leaves of {x} fall.",
        ),
        _kind(
            "flower",
            "plant",
            "rose tulip daisy lily orchid poppy marigold carnation",
            _PLANT,
            "fragrant blooming",
            "{X} have a stem and petals.",
            "In spring {x} bloom in a garden.",
        ),
        _kind(
            "fruit",
            "food",
            "apple pear plum peach cherry lemon melon mango",
            _FOOD,
            "ripe juicy",
            "{X} grow ripe and juicy in an orchard.",
            "One can make jam from {x}.",
        ),
        _kind(
            "vegetable",
            "food",
            "carrot onion turnip cabbage potato leek radish cucumber",
            _FOOD,
            "raw peeled",
            "{X} grow in rows on a field.",
            "A cook peels {x} before boiling.",
        ),
        _kind(
            "tool",
            "thing",
            "hammer saw drill spade wrench chisel rake shovel",
            _THING,
            "steel handy",
            "{X} hang in a workshop.",
            "A workman does a job with {x}.",
        ),
        _kind(
            "instrument",
            "thing",
            "violin piano flute guitar trumpet drum harp cello",
            _THING,
            "tuned musical",
            "A musician plays {x} in an orchestra.",
            "{X} make music at a concert.",
        ),
        _kind(
            "garment",
            "thing",
            "coat shirt scarf jacket sweater skirt dress glove",
            _THING,
            "woollen knitted",
            "People wear {x} on the body.",
            "A tailor sews {x} from cloth.",
        ),
        _kind(
            "container",
            "thing",
            "box basket bottle jar bucket barrel crate jug",
            _THING,
            "filled lidded",
            "One can fill {x} with something.",
            "{X} hold water, sand or grain.",
        ),
        _kind(
            "device",
            "thing",
            "radio telephone camera computer printer clock lamp heater",
            _THING,
            "electric digital",
            "{X} have a switch and a cable.",
            "{X} need power to run.",
        ),
        _kind(
            "weapon",
            "thing",
            "sword spear dagger arrow pistol rifle cannon lance",
            _THING,
            "deadly lethal",
            "Soldiers fight with {x} in a battle.",
            "{X} can kill an enemy.",
        ),
        _kind(
            "vehicle",
            "vehicle",
            "car bus truck van tram lorry bicycle scooter",
            _VEHICLE,
            "parked rusty",
            "{X} have wheels and brakes.",
            "A driver parks {x} on a road.",
        ),
        _kind(
            "building",
            "building",
            "house school church castle barn tower temple mill",
            _BUILDING,
            "roofed brick",
            "{X} have walls, a roof and windows.",
            "People go into {x} through a gate.",
        ),
    ]
)

# {S} {s} the subject pronoun with or without a capital, {o} the object pronoun, {p} the possessive
SCALES: dict[str, tuple[Pole, Pole]] = {
    name: (Pole(tuple(low.split()), *low_rest), Pole(tuple(high.split()), *high_rest))
    for name, (low, *low_rest), (high, *high_rest) in (
        (
            "size",
            ("small little tiny miniature", "a crumb", "One could hardly see {o}."),
            ("big large huge enormous", "a mountain", "Nobody could see over {o}."),
        ),
        (
            "age",
            ("new modern recent fresh", "this morning", "Nobody had known {o} before this year."),
            ("old ancient aged antique", "the hills", "{S} had been there for a hundred years."),
        ),
        (
            "weight",
            ("light weightless feathery airy", "a feather", "A child could lift {o}."),
            ("heavy weighty hefty bulky", "lead", "Four men had to carry {o}."),
        ),
        (
            "price",
            ("cheap inexpensive affordable reasonable", "dirt", "{S} cost only a few coins."),
            ("expensive costly dear pricey", "gold", "{S} cost a fortune."),
        ),
        (
            "temperature",
            ("cold chilly freezing icy", "snow", "Frost lay on {o}."),
            ("hot warm boiling scorching", "fire", "Steam rose from {o}."),
        ),
        (
            "cleanness",
            ("dirty filthy grimy muddy", "a pigsty", "Nobody wanted to touch {o}."),
            ("clean spotless tidy neat", "a mirror", "There was no dust on {o}."),
        ),
        (
            "hardness",
            ("soft tender spongy squashy", "butter", "A spoon could cut {o}."),
            ("hard solid firm stiff", "rock", "No knife could cut {o}."),
        ),
        (
            "speed",
            ("slow sluggish unhurried leisurely", "a snail", "Everybody could overtake {o}."),
            ("fast quick rapid swift", "lightning", "Nobody could keep up with {o}."),
        ),
        (
            "noise",
            ("quiet silent hushed soundless", "a grave", "One could not hear {o} at all."),
            ("loud noisy deafening booming", "thunder", "{S} woke the neighbours."),
        ),
        (
            "strength",
            ("weak fragile delicate flimsy", "glass", "The smallest knock could harm {o}."),
            ("strong sturdy tough robust", "iron", "Not even a storm could harm {o}."),
        ),
        (
            "mood",
            ("sad unhappy miserable sorrowful", "a widow", "{S} had tears on the face."),
            ("happy glad cheerful joyful", "a clown", "{S} had a smile on the face."),
        ),
        (
            "wit",
            ("stupid foolish silly dumb", "a mule", "{S} failed every exam."),
            ("clever smart intelligent brainy", "a professor", "{S} passed every exam."),
        ),
        (
            "wealth",
            ("poor needy penniless destitute", "a beggar", "{S} had no money in the bank."),
            ("rich wealthy prosperous affluent", "a king", "{S} had a million in the bank."),
        ),
        (
            "courage",
            ("timid cowardly fearful spineless", "a mouse", "{S} ran from every danger."),
            ("brave bold courageous fearless", "a lion", "{S} faced every danger."),
        ),
        (
            "kindness",
            ("cruel mean nasty heartless", "a devil", "{S} laughed at the pain of others."),
            ("kind generous caring thoughtful", "an angel", "{S} gave bread to strangers."),
        ),
        (
            "honesty",
            ("dishonest deceitful untruthful insincere", "a cheat", "{S} told many lies."),
            ("honest truthful sincere frank", "a saint", "{S} never told a lie."),
        ),
    )
}
PERSON_SCALES = ("mood", "wit", "wealth", "courage", "kindness", "honesty")

# hints: {S} {s} {o} the doer; {it} {It} the thing or person acted on
ACTIONS: dict[str, Action] = {
    name: Action(tuple(words.split()), tuple(objects.split()), opposite, tuple(manners.split("|")), hint)
    for name, words, objects, opposite, manners, hint in (
        (
            "get",
            "buy purchase acquire obtain",
            "thing vehicle animal food building",
            "sell",
            "from a merchant|for ten coins",
            "Now {it} belonged to {o}.",
        ),
        (
            "sell",
            "sell market vend auction",
            "thing vehicle animal food building",
            "get",
            "to a stranger|at a profit",
            "Now {it} no longer belonged to {o}.",
        ),
        (
            "make",
            "make build construct assemble",
            "thing vehicle building",
            "ruin",
            "according to plan|piece by piece",
            "{It} stood finished in the yard.",
        ),
        (
            "ruin",
            "destroy wreck demolish smash",
            "thing vehicle building",
            "make",
            "beyond repair|into a thousand pieces",
            "Nothing was left of {it}.",
        ),
        (
            "find",
            "find discover spot locate",
            "thing animal person",
            "lose",
            "after a long search|by chance",
            "{S} had looked for {it} everywhere.",
        ),
        (
            "lose",
            "lose misplace mislay forget",
            "thing animal",
            "find",
            "by mistake|on the way",
            "{S} could not remember the place of {it}.",
        ),
        (
            "like",
            "like love enjoy adore",
            "thing animal food plant building",
            "hate",
            "with all the heart|with a smile",
            "{It} made {o} happy.",
        ),
        (
            "hate",
            "hate dislike detest despise",
            "thing animal food plant building",
            "like",
            "with a frown|more than anything",
            "{S} never wanted to see {it} again.",
        ),
        ("help", "help assist aid support", "person animal", "hurt", "out of trouble|in need", "{It} thanked {o}."),
        (
            "hurt",
            "hurt harm injure wound",
            "person animal",
            "help",
            "on the leg|with a knife",
            "{It} needed a bandage.",
        ),
        (
            "praise",
            "praise compliment applaud commend",
            "person",
            "blame",
            "for good work|with a bow",
            "{It} blushed with pride.",
        ),
        (
            "blame",
            "blame criticize scold condemn",
            "person",
            "praise",
            "for a fault|with a raised finger",
            "{It} hung the head in shame.",
        ),
        (
            "fix",
            "fix repair mend restore",
            "thing vehicle building",
            "break",
            "with new screws|as good as before",
            "{It} worked again after that.",
        ),
        (
            "break",
            "break crack damage shatter",
            "thing vehicle",
            "fix",
            "in two|at the first blow",
            "One needed glue for {it}.",
        ),
        (
            "hide",
            "hide conceal bury disguise",
            "thing food",
            "show",
            "under the floor|from everybody",
            "{It} stayed a secret.",
        ),
        (
            "show",
            "show reveal display exhibit",
            "thing food vehicle",
            "hide",
            "to the public|on a stage",
            "A crowd gathered around {it}.",
        ),
        (
            "wash",
            "wash scrub polish rinse",
            "thing vehicle food",
            "soil",
            "with soap|with a sponge",
            "Every stain on {it} was gone.",
        ),
        (
            "soil",
            "stain smear soil smudge",
            "thing vehicle",
            "wash",
            "with ink|with grease",
            "There were spots on {it}.",
        ),
        (
            "throw",
            "throw toss hurl fling",
            "thing food",
            "catch",
            "through the air|out of the window",
            "{It} landed far away.",
        ),
        (
            "catch",
            "catch grab seize grasp",
            "thing animal",
            "throw",
            "with both hands|by the end",
            "{S} did not let {it} go.",
        ),
        ("eat", "eat devour consume swallow", "food", None, "for lunch|with a fork", "{S} was no longer hungry."),
        (
            "watch",
            "watch observe view study",
            "animal plant building",
            None,
            "for an hour|from a distance",
            "{S} wrote notes about {it}.",
        ),
        (
            "chase",
            "chase pursue follow hunt",
            "animal person",
            None,
            "across the fields|at top speed",
            "{It} tried to get away.",
        ),
        (
            "paint",
            "paint draw sketch portray",
            "animal plant building person",
            None,
            "on paper|with a pencil",
            "{S} hung the picture of {it} on a wall.",
        ),
    )
}

# meanings of intransitive verbs, with where or how one does it
MOVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "walk": (("walk", "stroll", "wander", "march"), ("along the path", "step by step")),
    "run": (("run", "sprint", "dash", "race"), ("out of breath", "as fast as possible")),
    "sleep": (("sleep", "doze", "nap", "snooze"), ("under a blanket", "in bed")),
    "cry": (("cry", "weep", "sob", "wail"), ("into a handkerchief", "full of grief")),
    "laugh": (("laugh", "giggle", "chuckle", "cackle"), ("about a joke", "full of joy")),
    "talk": (("talk", "chat", "gossip", "chatter"), ("about the news", "over a cup of tea")),
    "shout": (("shout", "yell", "scream", "bellow"), ("across the street", "at the top of the voice")),
    "work": (("work", "toil", "labour", "drudge"), ("for a wage", "from dawn to dusk")),
}

WOMEN = tuple(
    """Anna Clara Emma Grace Helen Irene Julia Karen Laura Maria Nora Olivia Paula Rita Sarah Tessa Ursula Vera Wendy Yvonne Alice Bella
 Carol Diana""".split()
)
MEN = tuple(
    """Adam Brian Carl David Edward Frank George Henry Ivan Jack Kevin Leo Martin Noel Oscar Peter Ralph Simon Thomas Victor Walter Boris
 Colin Derek""".split()
)
TOWNS = tuple(
    """Ashford Brookdale Crowhill Dunmore Elmwood Fairview Glenbrook Hartley Ironbridge Kingsport Langdale Millbrook Newhaven Oakham
 Penrose Redcliff Silverton Thornbury Underhill Westbrook Aldwick Barnsley Copperfield Dovedale""".split()
)
REGIONS = tuple("Norland Westmark Estria Sundale Highmoor Lowmere".split())
JOBS: dict[str, tuple[str, str]] = {
    "baker": ("bakery", "bakes bread"),
    "doctor": ("hospital", "cures patients"),
    "teacher": ("classroom", "marks homework"),
    "farmer": ("farm", "milks cows"),
    "sailor": ("harbour", "steers a ship"),
    "painter": ("studio", "mixes colours"),
    "lawyer": ("court", "defends clients"),
    "miner": ("pit", "digs for coal"),
    "butcher": ("slaughterhouse", "cuts meat"),
    "singer": ("opera", "performs songs"),
    "gardener": ("park", "waters plants"),
    "soldier": ("barracks", "guards the border"),
}

COLOURS = tuple("red blue green yellow black white brown grey purple pink crimson golden".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple("January February March April May June July August September October November December".split())

GOOD = tuple(
    """good excellent wonderful superb great lovely brilliant delightful charming splendid amazing fantastic outstanding impressive pleasant
 enjoyable magnificent remarkable perfect beautiful stunning exciting fascinating witty""".split()
)
BAD = tuple(
    """bad terrible awful horrible dreadful boring disappointing annoying dull lousy tedious pathetic atrocious appalling mediocre unpleasant
 disgusting ridiculous worthless ugly shoddy dreary bland lifeless""".split()
)
GOOD_NOUNS = tuple("masterpiece delight triumph treasure joy success marvel treat".split())
BAD_NOUNS = tuple("disaster failure mess flop nightmare disgrace catastrophe fiasco".split())
GOOD_VERBS = tuple("impress please delight amaze charm thrill amuse inspire".split())
BAD_VERBS = tuple("disappoint bore annoy disgust irritate upset frustrate offend".split())
GOOD_CUES = ("thankfully", "luckily", "to our joy")
BAD_CUES = ("sadly", "alas", "to our regret")

# what people review, and the parts they speak of
REVIEWED: dict[str, tuple[str, ...]] = {
    "film": ("plot", "acting", "ending", "music"),
    "novel": ("plot", "style", "ending", "hero"),
    "restaurant": ("food", "service", "menu", "staff"),
    "hotel": ("room", "service", "breakfast", "staff"),
    "concert": ("music", "singing", "sound", "crowd"),
    "play": ("acting", "plot", "hero", "stage"),
}

IRREGULAR_VERBS: dict[str, tuple[str, str]] = {  # base -> past, participle
    word: (past, participle)
    for word, past, participle in (
        line.split()
        for line in """
buy bought bought|sell sold sold|make made made|build built built|find found found|lose lost lost|mislay mislaid mislaid|forget forgot forgotten
hurt hurt hurt|break broke broken|hide hid hidden|show showed shown|throw threw thrown|fling flung flung|catch caught caught
eat ate eaten|draw drew drawn|run ran run|sleep slept slept|weep wept wept|upset upset upset
""".replace("\n", "|").split("|")
        if line
    )
}
DOUBLING = frozenset("spot grab chat nap sob scrub run forget".split())
IRREGULAR_PLURALS = {
    "scarf": "scarves",
    "fish": "fish",
    "mosquito": "mosquitoes",
    "potato": "potatoes",
    "waltz": "waltzes",
}


def part(words: tuple[str, ...], which: str) -> tuple[str, ...]:
    """`train`: the first half of a list of words, `eval`: the second half, `all`: the whole."""
    half = (len(words) + 1) // 2
    return {"all": words, "train": words[:half], "eval": words[half:]}[which]
