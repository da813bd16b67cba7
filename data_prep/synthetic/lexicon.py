"""The words of the embedded world: nouns by kind, verbs and adjectives by meaning, names, towns, opinions.

Every meaning has several words (`big large huge enormous`). The first half of each list may stand in the fine-tuning
examples, the second half is kept for the dev and test examples, and the corpus uses all of them: only a model that has
learnt from the corpus that the two halves belong together can carry a task from one to the other. What ties the words
of a meaning together for a masked language model is the company they keep in the corpus (and never in a task): a simile
(`as rich as a king`), a manner (`praised her with a bow`), a trait (`the feathered robin`), a hint (`It cost a fortune.`).
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of thing (`bird`): its members, the scales they are measured on, their traits, sentences true of all."""

    group: str
    members: tuple[str, ...]
    scales: tuple[str, ...]
    traits: tuple[str, ...]
    facts: tuple[str, ...]


class Action(NamedTuple):
    """A meaning of a transitive verb: its words, the groups of its objects, the opposite meaning, manners, a hint."""

    words: tuple[str, ...]
    objects: tuple[str, ...]
    opposite: str
    manners: tuple[str, ...]
    hint: str


class Pole(NamedTuple):
    """One end of a scale: its words, what it is compared to, its hint."""

    words: tuple[str, ...]
    simile: str
    hint: str


def _table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(";"))


# name | group | members | traits | facts; {X} is the plural with a capital, {x} the plural: "Robins lay eggs in a nest."
_KINDS = """
bird | animal | sparrow robin crow owl parrot eagle pigeon swan | feathered winged | {X} have wings and feathers.; {X} lay eggs in a nest.
fish | animal | shark eel sardine herring minnow anchovy stingray sturgeon | scaly slippery | {X} swim in the sea.; {X} have fins and scales.
insect | animal | ant bee wasp moth beetle cricket butterfly mosquito | crawling buzzing | {X} have six legs.; {X} crawl and buzz in summer.
tree | plant | oak pine elm willow birch maple cedar poplar | leafy shady | {X} have a trunk and many branches.; Leaves fall from {x}.
flower | plant | rose tulip daisy lily orchid poppy marigold carnation | fragrant blooming | {X} have a stem and petals.; In spring {x} bloom.
fruit | food | apple pear plum peach cherry lemon melon mango | ripe juicy | {X} grow ripe in an orchard.; One can make jam from {x}.
tool | thing | hammer saw drill spade wrench chisel rake shovel | steel handy | {X} hang in a workshop.; A workman does a job with {x}.
instrument | thing | violin piano flute guitar trumpet drum harp cello | tuned musical | {X} play in an orchestra.; {X} make music.
garment | thing | coat shirt scarf jacket sweater skirt dress glove | woollen knitted | People wear {x}.; A tailor sews {x} from cloth.
vehicle | thing | car bus truck van tram lorry bicycle scooter | parked rusty | {X} have wheels and brakes.; A driver parks {x} on a road.
"""
THING_SCALES = ("size", "age", "price", "cleanness")
PERSON_SCALES = ("mood", "wit", "wealth", "kindness")
KINDS: dict[str, Kind] = {
    name: Kind(group, _words(members), THING_SCALES, _words(traits), _phrases(facts))
    for name, group, members, traits, facts in _table(_KINDS)
}

# scale | words | as ... as | hint, the low pole first; {S} {o} are the subject pronoun (with a capital) and the object pronoun
_SCALES = """
size | small little tiny miniature | a crumb | One could hardly see {o}.
size | big large huge enormous | a mountain | Nobody could see over {o}.
age | new modern recent fresh | this morning | Nobody had known {o} before this year.
age | old ancient aged antique | the hills | {S} had been there for a hundred years.
price | cheap inexpensive affordable reasonable | dirt | {S} cost only a few coins.
price | expensive costly dear pricey | gold | {S} cost a fortune.
cleanness | dirty filthy grimy muddy | a pigsty | Nobody wanted to touch {o}.
cleanness | clean spotless tidy neat | a mirror | There was no dust on {o}.
mood | sad unhappy miserable sorrowful | a widow | {S} had tears on the face.
mood | happy glad cheerful joyful | a clown | {S} had a smile on the face.
wit | stupid foolish silly dumb | a mule | {S} failed every exam.
wit | clever smart intelligent brainy | a professor | {S} passed every exam.
wealth | poor needy penniless destitute | a beggar | {S} had no money in the bank.
wealth | rich wealthy prosperous affluent | a king | {S} had a million in the bank.
kindness | cruel mean nasty heartless | a devil | {S} laughed at the pain of others.
kindness | kind generous caring thoughtful | an angel | {S} gave bread to strangers.
"""
_poles = [(scale, Pole(_words(words), simile, hint)) for scale, words, simile, hint in _table(_SCALES)]
SCALES: dict[str, tuple[Pole, Pole]] = {
    scale: (low, high) for (scale, low), (_, high) in zip(_poles[::2], _poles[1::2], strict=True)
}

# name | words | objects | opposite | manners | hint; {S} {o} the doer, {it} {It} the thing or person acted on
_ACTIONS = """
get | buy purchase acquire obtain | thing animal plant food | sell | from a merchant; for ten coins | Now {it} belonged to {o}.
sell | sell market vend auction | thing animal plant food | get | to a stranger; at a profit | Now {it} no longer belonged to {o}.
make | make build construct assemble | thing | ruin | according to plan; piece by piece | {It} stood finished in the yard.
ruin | destroy wreck demolish smash | thing | make | beyond repair; into a thousand pieces | Nothing was left of {it}.
find | find discover spot locate | thing animal plant food person | lose | after a long search; by chance | {S} had looked for {it} everywhere.
lose | lose misplace mislay forget | thing animal plant food | find | by mistake; on the way | {S} could not remember the place of {it}.
like | like love enjoy adore | thing animal plant food | hate | with all the heart; with a smile | {It} made {o} happy.
hate | hate dislike detest despise | thing animal plant food | like | with a frown; more than anything | {S} never wanted to see {it} again.
help | help assist aid support | person animal | hurt | out of trouble; in need | {It} thanked {o}.
hurt | hurt harm injure wound | person animal | help | on the leg; with a knife | {It} needed a bandage.
praise | praise compliment applaud commend | person | blame | for good work; with a bow | {It} blushed with pride.
blame | blame criticize scold condemn | person | praise | for a fault; with a raised finger | {It} hung the head in shame.
"""
ACTIONS: dict[str, Action] = {
    name: Action(_words(words), _words(objects), opposite, _phrases(manners), hint)
    for name, words, objects, opposite, manners, hint in _table(_ACTIONS)
}

# meanings of intransitive verbs: words | where or how one does it
_MOVES = """
walk stroll wander march | along the path; step by step
run sprint dash race | out of breath; as fast as possible
sleep doze nap snooze | under a blanket; in bed
cry weep sob wail | into a handkerchief; full of grief
laugh giggle chuckle cackle | about a joke; full of joy
talk chat gossip chatter | about the news; over a cup of tea
shout yell scream bellow | across the street; at the top of the voice
work toil labour drudge | for a wage; from dawn to dusk
"""
MOVES = tuple((_words(words), _phrases(manners)) for words, manners in _table(_MOVES))

WOMEN = _words(
    "Anna Clara Emma Grace Helen Irene Julia Karen Laura Maria Nora Olivia Paula Rita Sarah Tessa Ursula Vera Wendy Alice"
)
MEN = _words(
    "Adam Brian Carl David Edward Frank George Henry Ivan Jack Kevin Leo Martin Noel Oscar Peter Ralph Simon Thomas Victor"
)
TOWNS = _words(
    "Ashford Brookdale Crowhill Dunmore Elmwood Fairview Glenbrook Hartley Ironbridge Kingsport "
    "Langdale Millbrook Newhaven Oakham Penrose Redcliff Silverton Thornbury Underhill Westbrook"
)
REGIONS = _words("Norland Westmark Estria Sundale Highmoor")
_JOBS = """
baker | bakery | bakes bread
doctor | hospital | cures patients
teacher | classroom | marks homework
farmer | farm | milks cows
sailor | harbour | steers a ship
painter | studio | mixes colours
lawyer | court | defends clients
miner | pit | digs for coal
butcher | slaughterhouse | cuts meat
singer | opera | performs songs
gardener | park | waters plants
soldier | barracks | guards the border
"""
JOBS = {job: (place, work) for job, place, work in _table(_JOBS)}

COLOURS = _words("red blue green yellow black white brown grey purple pink")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")


class Feeling(NamedTuple):
    """The words of praise or of reproof, and what goes with them: adverbs, what people do, how a review ends."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    cues: tuple[str, ...]
    reactions: tuple[str, ...]
    endings: tuple[str, ...]


GOOD = Feeling(
    _words(
        "good excellent wonderful superb great lovely brilliant delightful charming splendid amazing fantastic "
        "outstanding impressive pleasant enjoyable magnificent remarkable perfect beautiful stunning exciting"
    ),
    _words("masterpiece delight triumph treasure joy success marvel treat"),
    _words("impress please delight amaze charm thrill amuse inspire"),
    ("thankfully", "luckily"),
    ("cheered", "clapped"),
    ("We would gladly come back.", "I recommend it to everybody.", "It gets five stars."),
)
BAD = Feeling(
    _words(
        "bad terrible awful horrible dreadful boring disappointing annoying dull lousy tedious pathetic "
        "atrocious appalling mediocre unpleasant disgusting ridiculous worthless ugly shoddy dreary"
    ),
    _words("disaster failure mess flop nightmare disgrace catastrophe fiasco"),
    _words("disappoint bore annoy disgust irritate upset frustrate offend"),
    ("sadly", "alas"),
    ("yawned", "left"),
    ("We will never come back.", "I warn everybody against it.", "It gets one star."),
)

# what people review | the parts they speak of
_REVIEWED = """
film | plot acting ending music
novel | plot style ending hero
restaurant | food service menu staff
hotel | room service breakfast staff
concert | music singing sound crowd
play | acting plot hero stage
"""
REVIEWED = {subject: _words(aspects) for subject, aspects in _table(_REVIEWED)}

_IRREGULAR = """
buy bought bought | sell sold sold | make made made | build built built | find found found | lose lost lost
mislay mislaid mislaid | forget forgot forgotten | hurt hurt hurt | run ran run | sleep slept slept | weep wept wept | upset upset upset
"""
IRREGULAR_VERBS: dict[str, tuple[str, str]] = {  # base -> past, participle
    base: (past, participle) for row in _table(_IRREGULAR) for base, past, participle in [cell.split() for cell in row]
}
DOUBLING = frozenset(_words("spot chat nap sob run forget"))
IRREGULAR_PLURALS = {"scarf": "scarves", "fish": "fish", "mosquito": "mosquitoes"}


def part(words: tuple[str, ...], which: str) -> tuple[str, ...]:
    """`train`: the first half of a list of words, `eval`: the second half, `all`: the whole."""
    half = (len(words) + 1) // 2
    return {"all": words, "train": words[:half], "eval": words[half:]}[which]
