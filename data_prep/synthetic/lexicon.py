"""The words of the embedded world: verbs and adjectives by meaning, nouns by kind, names, towns, times.

Every list has two halves: fine-tuning examples use the words of the first, dev and test examples those of the second,
the corpus all. Only a model that has learnt from the corpus that `small little` and `tiny miniature` belong together
can carry a task from one half to the other. For a masked language model they do by their company, which no task shows:
`as tiny as a crumb`, `praised her with a bow`, `the feathered robin`, `One could hardly see it.` Inflection is regular.
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    """What several words say: of whom or what (groups), the opposite, company where {w} is the word, a hint."""

    words: tuple[str, ...]
    groups: tuple[str, ...]
    opposite: str  # its first word
    company: tuple[str, ...]
    hint: str  # {S} and {o} are the subject's pronouns, {it} and {It} the object


class Kind(NamedTuple):
    """A kind of thing: its members, what goes in front of them, sentences true of all ({X} and {x} the plural)."""

    group: str
    members: tuple[str, ...]
    company: tuple[str, ...]
    truths: tuple[str, ...]


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(";"))


def _meanings(table: str) -> dict[str, Meaning]:
    return {
        words.split()[0]: Meaning(tuple(words.split()), tuple(groups.split()), opposite, _phrases(company), hint)
        for words, groups, opposite, company, hint in _rows(table)
    }


ADJECTIVES = _meanings("""
small little tiny miniature | thing animal plant food | big | as {w} as a crumb | One could hardly see {o}.
big large huge enormous | thing animal plant food | small | as {w} as a mountain | Nobody could see over {o}.
new modern recent fresh | thing animal plant food | old | as {w} as this morning | Nobody had known {o} before this year.
old ancient aged antique | thing animal plant food | new | as {w} as the hills | {S} had been there for a hundred years.
cheap inexpensive affordable reasonable | thing animal plant food | expensive | as {w} as dirt | {S} cost only a few coins.
expensive costly dear pricey | thing animal plant food | cheap | as {w} as gold | {S} cost a fortune.
dirty filthy grimy muddy | thing animal plant food | clean | as {w} as a pigsty | Nobody wanted to touch {o}.
clean spotless tidy neat | thing animal plant food | dirty | as {w} as a mirror | There was no dust on {o}.
sad unhappy miserable sorrowful | person | happy | as {w} as a widow | {S} had tears on the face.
happy glad cheerful joyful | person | sad | as {w} as a clown | {S} had a smile on the face.
stupid foolish silly dumb | person | clever | as {w} as a mule | {S} failed every exam.
clever smart intelligent brainy | person | stupid | as {w} as a professor | {S} passed every exam.
poor needy penniless destitute | person | rich | as {w} as a beggar | {S} had no money in the bank.
rich wealthy prosperous affluent | person | poor | as {w} as a king | {S} had a million in the bank.
cruel mean nasty heartless | person | kind | as {w} as a devil | {S} laughed at the pain of others.
kind generous caring thoughtful | person | cruel | as {w} as an angel | {S} gave bread to strangers.
good excellent wonderful superb great lovely brilliant delightful charming splendid amazing fantastic outstanding impressive pleasant enjoyable magnificent remarkable | work | bad | so {w} that we cheered; so {w} that we clapped; thankfully {w} | I recommend {o} to everybody.
bad terrible awful horrible dreadful boring disappointing annoying dull lousy tedious pathetic atrocious appalling mediocre unpleasant disgusting ridiculous | work | good | so {w} that we yawned; so {w} that we left; sadly {w} | I warn everybody against {o}.
""")
VERBS = _meanings("""
order purchase acquire obtain | thing animal plant food | market | {w} from a merchant; {w} for ten coins | Now {it} belonged to {o}.
market auction vend trade | thing animal plant food | order | {w} to a stranger; {w} at a profit | Now {it} no longer belonged to {o}.
create assemble construct produce | thing | destroy | {w} according to plan; {w} piece by piece | {It} stood finished in the yard.
destroy wreck demolish smash | thing | create | {w} beyond repair; {w} into a thousand pieces | Nothing was left of {it}.
discover notice locate detect | thing animal plant food person | miss | {w} after a long search; {w} by chance | {S} had looked for {it} everywhere.
miss overlook neglect ignore | thing animal plant food person | discover | {w} by mistake; {w} on the way | {S} could not remember the place of {it}.
like love enjoy adore | thing animal plant food | hate | {w} with all the heart; {w} with a smile | {It} made {o} happy.
hate dislike detest despise | thing animal plant food | like | {w} with a frown; {w} more than anything | {S} never wanted to see {it} again.
help assist aid support | person animal | harm | {w} out of trouble; {w} in need | {It} thanked {o}.
harm injure wound damage | person animal | help | {w} on the leg; {w} with a knife | {It} needed a bandage.
praise compliment applaud commend | person | blame | {w} for good work; {w} with a bow | {It} blushed with pride.
blame criticize scold condemn | person | praise | {w} for a fault; {w} with a raised finger | {It} hung the head in shame.
""")
MOVES = _meanings("""
walk stroll wander march | | | along the path; step by step |
race sprint dash rush | | | out of breath; as fast as possible |
sleep doze rest snooze | | | under a blanket; in bed |
cry weep moan wail | | | into a handkerchief; full of grief |
laugh giggle chuckle cackle | | | about a joke; full of joy |
talk speak gossip chatter | | | about the news; over a cup of tea |
shout yell scream bellow | | | across the street; at the top of the voice |
work toil labour drudge | | | for a wage; from dawn to dusk |
""")
KINDS = {
    name: Kind(group, tuple(members.split()), tuple(company.split()), _phrases(truths))
    for name, group, members, company, truths in _rows("""
bird | animal | sparrow robin crow owl parrot eagle pigeon swan | feathered winged | {X} have wings and feathers.; {X} lay eggs in a nest.
fish | animal | shark eel sardine herring minnow salmon stingray sturgeon | scaly slippery | {X} swim in the sea.; {X} have fins and scales.
insect | animal | ant bee wasp moth beetle cricket butterfly hornet | crawling buzzing | {X} have six legs.; {X} crawl and buzz in summer.
tree | plant | oak pine elm willow birch maple cedar poplar | leafy shady | {X} have a trunk and many branches.; Leaves fall from {x}.
flower | plant | rose tulip daisy lily orchid poppy marigold carnation | fragrant blooming | {X} have a stem and petals.; In spring {x} bloom.
fruit | food | apple pear plum peach cherry lemon melon apricot | ripe juicy | {X} grow ripe in an orchard.; One can make jam from {x}.
tool | thing | hammer saw drill spade wrench chisel rake shovel | steel handy | {X} hang in a workshop.; A workman does a job with {x}.
instrument | thing | violin piano flute guitar trumpet drum harp cello | tuned musical | {X} play in an orchestra.; {X} make music.
garment | thing | coat shirt jacket apron sweater skirt dress glove | woollen knitted | People wear {x}.; A tailor sews {x} from cloth.
vehicle | thing | car bus truck van tram tractor bicycle scooter | parked rusty | {X} have wheels and brakes.; A driver parks {x} on a road.
work | work | film novel play opera concert musical song show | famous latest | Critics write about {x}.; {X} have an audience.
""")
}
JOBS = tuple("baker doctor teacher farmer sailor painter lawyer miner butcher singer gardener soldier".split())
WOMEN = tuple("Anna Clara Emma Grace Helen Irene Julia Karen Laura Maria Nora Olivia Paula Rita Sarah Vera".split())
MEN = tuple("Adam Brian Carl David Edward Frank George Henry Ivan Jack Kevin Leo Martin Noel Oscar Peter".split())
TOWNS = tuple(
    "Ashford Brookdale Crowhill Dunmore Elmwood Fairview Glenbrook Hartley "
    "Ironbridge Kingsport Langdale Millbrook Newhaven Oakham Penrose Redcliff".split()
)
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple("January February March April May June July August September October November December".split())
