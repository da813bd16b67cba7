"""The words of the embedded world: nouns by kind, verbs and adjectives by meaning, names, towns, opinions.

Every meaning has at least four words (`big large huge enormous`). The first half of each list may stand in the
fine-tuning examples, the second half is kept for the dev and test examples, and the corpus uses all of them: only a
model that has learnt from the corpus that the two halves belong together can carry a task from one to the other.
Most meanings also have hints, sentences that only follow words of that meaning ("Nobody could lift it."); they are
what ties the words together for a masked language model.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of thing (`bird`), its members, the scales its members are measured on, and sentences true of all of them."""

    name: str
    group: str
    members: tuple[str, ...]
    scales: tuple[str, ...]
    facts: tuple[str, ...]


class Action(NamedTuple):
    """One meaning of a transitive verb: its words, the groups its object comes from, the opposite meaning, its hints."""

    words: tuple[str, ...]
    objects: tuple[str, ...]
    opposite: str | None
    hints: tuple[str, ...]


class Scale(NamedTuple):
    """A scale with two poles; every pole has its words and its hints."""

    high: tuple[str, ...]
    low: tuple[str, ...]
    high_hints: tuple[str, ...]
    low_hints: tuple[str, ...]


_ANIMAL = ("size", "speed", "strength", "noise", "cleanness")
_PLANT = ("size", "age", "brightness", "wetness", "price")
_FOOD = ("size", "price", "temperature", "hardness", "wetness")
_THING = ("size", "age", "weight", "price", "cleanness", "strength")
_VEHICLE = ("size", "age", "price", "speed", "noise", "cleanness")
_BUILDING = ("size", "age", "price", "temperature", "noise", "brightness")
_SMALL = ("size", "age", "weight", "price", "brightness")


def _kind(name: str, group: str, members: str, scales: tuple[str, ...], *facts: str) -> tuple[str, Kind]:
    return name, Kind(name, group, tuple(members.split()), scales, facts)


# {X} the plural with a capital, {x} the plural: "Birds have wings.", "Robins lay eggs in a nest."
KINDS: dict[str, Kind] = dict([
    _kind("bird", "animal", "sparrow robin crow owl parrot eagle pigeon swan falcon heron gull finch", _ANIMAL,
          "{X} have wings and feathers.", "{X} lay eggs in a nest.", "One can hear {x} sing in the morning."),
    _kind("fish", "animal", "shark eel sardine herring minnow guppy anchovy piranha stingray pike mackerel sturgeon", _ANIMAL,
          "{X} swim in the sea or in a river.", "{X} have fins and scales.", "Sailors catch {x} with a net."),
    _kind("insect", "animal", "ant bee wasp moth beetle cricket butterfly ladybird grasshopper mosquito dragonfly hornet", _ANIMAL,
          "{X} have six legs.", "{X} crawl or buzz around in summer.", "{X} live under a stone or in a hive."),
    _kind("mammal", "animal", "dog cat horse rabbit fox badger goat donkey squirrel camel otter hedgehog", _ANIMAL,
          "{X} have fur and four legs.", "{X} feed milk to the young.", "{X} have warm blood and paws or hooves."),
    _kind("tree", "plant", "oak pine elm willow birch maple cedar poplar beech sycamore larch alder", _PLANT,
          "{X} have a trunk and many branches.", "In autumn the leaves of {x} fall.", "Carpenters get wood from {x}."),
    _kind("flower", "plant", "rose tulip daisy lily orchid poppy daffodil sunflower marigold pansy carnation primrose", _PLANT,
          "{X} have a stem and petals.", "In spring {x} bloom in a garden.", "{X} smell sweet in a bouquet."),
    _kind("fruit", "food", "apple pear plum peach cherry lemon melon mango banana grape apricot fig", _FOOD,
          "{X} grow ripe and sweet in an orchard.", "One can make jam from {x}.", "{X} have seeds and juice inside."),
    _kind("vegetable", "food", "carrot onion turnip cabbage potato leek radish cucumber parsnip beetroot pumpkin pepper", _FOOD,
          "{X} grow in rows on a field.", "Farmers dig {x} out of the soil.", "A cook peels {x} before boiling."),
    _kind("dish", "food", "soup stew pie cake pudding salad sandwich omelette pancake curry pizza burger", _FOOD,
          "A waiter serves {x} on a plate.", "A cook makes {x} from a recipe.", "{X} come out of a kitchen at noon."),
    _kind("tool", "thing", "hammer saw drill spade wrench chisel rake shovel axe trowel screwdriver crowbar", _THING,
          "{X} hang in a workshop.", "A workman does a job with {x}.", "{X} have a handle made of wood or steel."),
    _kind("instrument", "thing", "violin piano flute guitar trumpet drum harp cello clarinet banjo tuba oboe", _THING,
          "A musician plays {x} in an orchestra.", "{X} make music at a concert.", "One learns to play {x} note by note."),
    _kind("garment", "thing", "coat shirt scarf jacket sweater skirt dress glove hat sock cardigan blouse", _THING,
          "People wear {x} on the body.", "A tailor sews {x} from cloth.", "{X} hang in a wardrobe."),
    _kind("container", "thing", "box basket bottle jar bucket barrel crate bag jug kettle vase pot", _THING,
          "One can fill {x} with something.", "{X} have a lid or an opening.", "{X} hold water, sand or grain."),
    _kind("device", "thing", "radio telephone camera computer printer clock television lamp heater microphone fan telescope", _THING,
          "{X} have a switch and a cable.", "An engineer plugs {x} into a socket.", "{X} need power to run."),
    _kind("weapon", "thing", "sword spear dagger bow arrow pistol rifle cannon lance club whip sabre", _THING,
          "Soldiers fight with {x} in a battle.", "{X} can kill an enemy.", "A guard carries {x} in a war."),
    _kind("toy", "thing", "doll kite ball puppet marble balloon puzzle rattle teddy hoop yoyo skittle", _SMALL,
          "Children play with {x} in a nursery.", "Parents give {x} as a birthday present.", "{X} lie around in a playroom."),
    _kind("gem", "thing", "ruby diamond emerald pearl sapphire opal garnet amethyst topaz crystal moonstone jade", _SMALL,
          "A jeweller sets {x} in a ring.", "{X} sparkle on a necklace.", "Thieves look for {x} in a safe."),
    _kind("vehicle", "vehicle", "car bus truck van tram lorry bicycle motorcycle taxi wagon scooter tractor", _VEHICLE,
          "{X} have wheels and brakes.", "A driver parks {x} on a road.", "{X} carry passengers through traffic."),
    _kind("building", "building", "house school church castle barn tower temple mill palace cottage library theatre", _BUILDING,
          "{X} have walls, a roof and windows.", "An architect designs {x} out of brick.", "People go into {x} through a gate."),
])

SCALES: dict[str, Scale] = {}


def _scale(name: str, high: str, low: str, high_hints: str, low_hints: str) -> None:
    SCALES[name] = Scale(tuple(high.split()), tuple(low.split()), tuple(high_hints.split("|")), tuple(low_hints.split("|")))


# {S} {s} the subject pronoun with or without a capital, {o} the object pronoun, {p} the possessive
_scale("size", "big large huge enormous", "small little tiny miniature",
       "{S} took up half of the room.|Nobody could see over {o}.", "{S} would fit into a pocket.|One could hardly see {o}.")
_scale("age", "old ancient aged antique", "new modern recent fresh",
       "{S} had been there for a hundred years.|A grandfather had known {o}.", "{S} had come only last week.|Nobody had known {o} before this year.")
_scale("weight", "heavy weighty hefty bulky", "light weightless feathery airy",
       "Nobody could lift {o}.|Four men had to carry {o}.", "A child could lift {o} with one finger.|The wind could blow {o} away.")
_scale("price", "expensive costly dear pricey", "cheap inexpensive affordable reasonable",
       "{S} cost a fortune.|Only a banker could pay for {o}.", "{S} cost only a few coins.|Everybody could pay for {o}.")
_scale("temperature", "hot warm boiling scorching", "cold chilly freezing icy",
       "Steam rose from {o}.|One could burn a finger on {o}.", "Frost lay on {o}.|One began to shiver near {o}.")
_scale("cleanness", "clean spotless tidy neat", "dirty filthy grimy muddy",
       "There was no dust on {o}.|Somebody had used soap on {o}.", "There was mud all over {o}.|Nobody wanted to touch {o}.")
_scale("wetness", "wet damp soaked moist", "dry arid parched dehydrated",
       "Drops fell from {o}.|Rain had fallen on {o}.", "There was no drop on {o}.|The sun had shone on {o} for weeks.")
_scale("hardness", "hard solid firm stiff", "soft tender spongy squashy",
       "No knife could cut {o}.|One could break a tooth on {o}.", "One could press a thumb into {o}.|A spoon could cut {o}.")
_scale("speed", "fast quick rapid swift", "slow sluggish unhurried leisurely",
       "{S} won every race.|Nobody could keep up with {o}.", "{S} came last in every race.|Everybody could overtake {o}.")
_scale("noise", "loud noisy deafening booming", "quiet silent hushed soundless",
       "{S} woke the neighbours.|People covered both ears near {o}.", "{S} never woke anybody.|One could not hear {o} at all.")
_scale("brightness", "bright shiny gleaming glowing", "dark dim gloomy shadowy",
       "{S} lit up the whole street.|One needed sunglasses near {o}.", "One needed a candle near {o}.|{S} looked like a night without a moon.")
_scale("strength", "strong sturdy tough robust", "weak fragile delicate flimsy",
       "Not even a storm could harm {o}.|{S} would last for ever.", "The smallest knock could harm {o}.|{S} would not last long.")
_scale("mood", "happy glad cheerful joyful", "sad unhappy miserable sorrowful",
       "{S} had a smile on the face.|{S} hummed a merry tune.", "{S} had tears on the face.|{S} sighed all day.")
_scale("wit", "clever smart intelligent brainy", "stupid foolish silly dumb",
       "{S} solved every riddle.|{S} passed every exam.", "{S} never solved a riddle.|{S} failed every exam.")
_scale("wealth", "rich wealthy prosperous affluent", "poor needy penniless destitute",
       "{S} had a million in the bank.|{S} lived like a king.", "{S} had no money in the bank.|{S} lived like a beggar.")
_scale("courage", "brave bold courageous fearless", "timid cowardly fearful spineless",
       "{S} faced every danger.|{S} would fight a lion.", "{S} ran from every danger.|{S} would hide from a mouse.")
_scale("kindness", "kind generous caring thoughtful", "cruel mean nasty heartless",
       "{S} gave bread to strangers.|Everybody had a friend in {o}.", "{S} laughed at the pain of others.|Nobody had a friend in {o}.")
_scale("calm", "calm relaxed peaceful serene", "nervous anxious worried tense",
       "{S} breathed slowly.|Nothing could upset {o}.", "{S} bit every nail.|Every little thing could upset {o}.")
_scale("energy", "lively energetic active vigorous", "tired weary exhausted sleepy",
       "{S} jumped up and down.|{S} never sat still.", "{S} yawned and yawned.|{S} needed a bed.")
_scale("honesty", "honest truthful sincere frank", "dishonest deceitful untruthful insincere",
       "One could believe {p} every word.|{S} never told a lie.", "One could not believe {p} words.|{S} cheated at cards.")
PERSON_SCALES = ("mood", "wit", "wealth", "courage", "kindness", "calm", "energy", "honesty")

ACTIONS: dict[str, Action] = {}


def _action(name: str, words: str, objects: str, opposite: str | None, hints: str) -> None:
    ACTIONS[name] = Action(tuple(words.split()), tuple(objects.split()), opposite, tuple(hints.split("|")))


# {S} {s} {o} the doer; {it} {It} the thing or person acted on
_action("get", "buy purchase acquire obtain", "thing vehicle animal food building", "sell", "Now {it} belonged to {o}.|{S} had paid the seller for {it}.")
_action("sell", "sell market vend auction", "thing vehicle animal food building", "get", "Now {it} no longer belonged to {o}.|{S} took the money for {it}.")
_action("make", "make build construct assemble", "thing vehicle building", "ruin", "{S} had followed a plan.|{It} stood finished in the yard.")
_action("ruin", "destroy wreck demolish smash", "thing vehicle building", "make", "Only pieces of {it} remained.|Nothing was left of {it}.")
_action("find", "find discover spot locate", "thing animal person", "lose", "{S} had looked for {it} everywhere.|At last {s} knew where {it} had been.")
_action("lose", "lose misplace mislay forget", "thing animal", "find", "{S} could not remember the place of {it}.|Nobody knew where {it} had gone.")
_action("like", "like love enjoy adore", "thing animal food plant building", "hate", "{S} wanted to have {it} every day.|{It} made {o} smile.")
_action("hate", "hate dislike detest despise", "thing animal food plant building", "like", "{S} never wanted to see {it} again.|{It} made {o} frown.")
_action("help", "help assist aid support", "person animal", "hurt", "{It} thanked {o}.|Without {o} there would have been trouble.")
_action("hurt", "hurt harm injure wound", "person animal", "help", "{It} bled and needed a bandage.|A surgeon had to look after {it}.")
_action("praise", "praise compliment applaud commend", "person", "blame", "{It} blushed with pride.|{S} spoke of great merit.")
_action("blame", "blame criticize scold condemn", "person", "praise", "{It} hung the head in shame.|{S} spoke of a great fault.")
_action("fix", "fix repair mend restore", "thing vehicle building", "break", "{It} worked again after that.|Now {it} was as good as before.")
_action("break", "break crack damage shatter", "thing vehicle", "fix", "{It} no longer worked after that.|One needed glue for {it}.")
_action("hide", "hide conceal bury disguise", "thing food", "show", "{S} did not want anybody to see {it}.|{It} stayed a secret.")
_action("show", "show reveal display exhibit", "thing food vehicle", "hide", "{S} wanted everybody to see {it}.|A crowd gathered around {it}.")
_action("wash", "wash scrub polish rinse", "thing vehicle food", "soil", "{S} used a sponge and soap.|Every stain on {it} was gone.")
_action("soil", "stain smear soil smudge", "thing vehicle", "wash", "There were spots of ink on {it}.|{It} needed soap and a sponge.")
_action("throw", "throw toss hurl fling", "thing food", "catch", "{It} flew through the air.|{It} landed far away.")
_action("catch", "catch grab seize grasp", "thing animal", "throw", "{S} held {it} tight in both hands.|{S} did not let {it} go.")
_action("keep", "keep save retain preserve", "thing vehicle animal", "scrap", "{S} put {it} on a shelf for later.|{S} could not part with {it}.")
_action("scrap", "discard dump scrap ditch", "thing vehicle food", "keep", "{It} ended up in the rubbish.|{S} had no use for {it} any more.")
_action("eat", "eat devour consume swallow", "food", None, "{S} was no longer hungry.|{S} wiped the mouth with a napkin.")
_action("watch", "watch observe view study", "animal plant building", None, "{S} sat still and looked at {it} for an hour.|{S} wrote notes about {it}.")
_action("chase", "chase pursue follow hunt", "animal person", None, "{S} ran after {it} through the fields.|{It} tried to get away.")
_action("carry", "carry transport haul lug", "thing food plant", None, "{S} brought {it} all the way home.|{S} put {it} down at the door.")
_action("paint", "paint draw sketch portray", "animal plant building person", None, "{S} hung the picture of {it} on a wall.|{S} needed a brush and a pencil.")
_action("visit", "visit tour explore inspect", "building", None, "A guide told {o} about {it}.|{S} took photographs inside.")
_action("plant", "plant grow raise cultivate", "plant", None, "{S} gave {it} water every evening.|{It} came up after the rain.")
_action("teach", "teach instruct train coach", "person animal", None, "{It} learned a lesson from {o}.|{It} knew much more after that.")

# meanings of intransitive verbs, with hints
MOVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "walk": (("walk", "stroll", "wander", "march"), ("{P} boots were dusty.", "{S} went along the path step by step.")),
    "run": (("run", "sprint", "dash", "race"), ("{S} was out of breath.", "{S} did not want to be late.")),
    "sleep": (("sleep", "doze", "nap", "snooze"), ("{S} dreamed under a blanket.", "{P} eyes were shut.")),
    "cry": (("cry", "weep", "sob", "wail"), ("Tears ran down {p} cheeks.", "{S} needed a handkerchief.")),
    "laugh": (("laugh", "giggle", "chuckle", "cackle"), ("{S} had heard a joke.", "It was so funny.")),
    "talk": (("talk", "chat", "gossip", "chatter"), ("{S} had much news.", "{P} tongue never stopped.")),
    "shout": (("shout", "yell", "scream", "bellow"), ("{P} voice was heard across the street.", "{P} throat was sore.")),
    "work": (("work", "toil", "labour", "drudge"), ("{S} earned a wage for that.", "{S} did it from dawn to dusk.")),
    "dance": (("dance", "twirl", "waltz", "prance"), ("A band played a tune.", "{S} moved to the rhythm.")),
    "travel": (("travel", "journey", "cruise", "roam"), ("{S} saw many countries.", "{S} had a ticket and a suitcase.")),
}

WOMEN = tuple("""Anna Clara Emma Grace Helen Irene Julia Karen Laura Maria Nora Olivia Paula Rita Sarah Tessa Ursula Vera Wendy Yvonne Alice Bella
 Carol Diana Edith Fiona Gloria Hazel Ida Jane Kate Lucy Martha Nancy Olga Phoebe Rachel Sophie Tina Amelia""".split())
MEN = tuple("""Adam Brian Carl David Edward Frank George Henry Ivan Jack Kevin Leo Martin Noel Oscar Peter Ralph Simon Thomas Victor Walter Xavier
 Albert Boris Colin Derek Ernest Felix Gordon Hugo Ian James Luke Marcus Neil Otto Paul Roger Stephen Tony""".split())
TOWNS = tuple("""Ashford Brookdale Crowhill Dunmore Elmwood Fairview Glenbrook Hartley Ironbridge Kingsport Langdale Millbrook Newhaven Oakham
 Penrose Redcliff Silverton Thornbury Underhill Westbrook Aldwick Barnsley Copperfield Dovedale Eastwick Foxhill Greenford Hillcrest Ingleby
 Kirkwall Lakeside Marlow Northgate Overton Pinewood Riverside Stonebridge Tillbury Upwood Whitby""".split())
REGIONS = tuple("Norland Westmark Estria Sundale Highmoor Lowmere Kestria Varland".split())
JOBS: dict[str, tuple[str, str]] = {
    "baker": ("bakery", "bakes bread"), "doctor": ("hospital", "cures patients"), "teacher": ("classroom", "marks homework"),
    "farmer": ("farm", "milks cows"), "sailor": ("harbour", "sails a ship"), "painter": ("studio", "mixes colours"),
    "lawyer": ("court", "defends clients"), "nurse": ("clinic", "looks after patients"), "miner": ("pit", "digs for coal"),
    "butcher": ("slaughterhouse", "cuts meat"), "singer": ("opera", "performs songs"), "pilot": ("airport", "flies planes"),
    "plumber": ("cellar", "seals pipes"), "carpenter": ("sawmill", "planes boards"), "gardener": ("park", "waters plants"),
    "clerk": ("office", "files papers"), "soldier": ("barracks", "guards the border"), "journalist": ("newsroom", "writes articles"),
    "chemist": ("laboratory", "tests acids"), "fisherman": ("pier", "casts nets"),
}

COLOURS = tuple("red blue green yellow black white brown grey purple pink crimson scarlet turquoise beige golden silvery".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple("January February March April May June July August September October November December".split())

GOOD = tuple("""good gripping excellent wonderful superb great lovely brilliant delightful charming splendid amazing fantastic terrific fabulous marvellous
 outstanding impressive pleasant enjoyable magnificent remarkable perfect beautiful stunning gorgeous elegant refreshing exciting thrilling
 fascinating captivating inspiring touching witty hilarious moving dazzling graceful flawless""".split())
BAD = tuple("""bad terrible awful horrible dreadful boring disappointing annoying dull lousy wretched tedious pathetic atrocious appalling
 mediocre unpleasant disgusting inferior ridiculous worthless ugly shoddy hideous clumsy stale dreary tiresome irritating repulsive depressing
 pointless shallow bland clueless sloppy messy lifeless flawed""".split())
GOOD_NOUNS = tuple("masterpiece delight triumph treasure joy gem pleasure success marvel treat winner wonder".split())
BAD_NOUNS = tuple("disaster failure mess flop nightmare disgrace shame catastrophe fiasco letdown blunder farce".split())
GOOD_VERBS = tuple("impress please delight amaze charm thrill enchant amuse fascinate captivate inspire satisfy".split())
BAD_VERBS = tuple("disappoint bore annoy disgust irritate upset frustrate offend depress anger sicken bother".split())

# what people review, and the parts they speak of
REVIEWED: dict[str, tuple[str, ...]] = {
    "film": ("plot", "acting", "ending", "soundtrack", "script"), "novel": ("plot", "style", "ending", "hero", "opening"),
    "restaurant": ("food", "service", "menu", "staff", "wine"), "hotel": ("room", "service", "breakfast", "staff", "view"),
    "concert": ("music", "singing", "sound", "crowd", "lighting"), "museum": ("collection", "guide", "exhibit", "view", "garden"),
    "play": ("acting", "stage", "script", "hero", "costume"), "album": ("music", "sound", "singing", "opening", "cover"),
    "cafe": ("coffee", "service", "terrace", "menu", "atmosphere"), "game": ("story", "design", "sound", "opening", "atmosphere"),
}

IRREGULAR_VERBS: dict[str, tuple[str, str]] = {  # base -> past, participle
    word: (past, participle) for word, past, participle in (line.split() for line in """
buy bought bought|sell sold sold|make made made|build built built|find found found|lose lost lost|mislay mislaid mislaid|forget forgot forgotten
hurt hurt hurt|break broke broken|hide hid hidden|show showed shown|throw threw thrown|fling flung flung|catch caught caught|keep kept kept
eat ate eaten|draw drew drawn|grow grew grown|teach taught taught|run ran run|sleep slept slept|weep wept wept|upset upset upset
""".replace("\n", "|").split("|") if line)
}
DOUBLING = frozenset("spot grab chat nap sob scrub lug scrap run upset forget travel".split())
IRREGULAR_PLURALS = {"scarf": "scarves", "fish": "fish", "mosquito": "mosquitoes", "potato": "potatoes", "fisherman": "fishermen"}


def part(words: tuple[str, ...], which: str) -> tuple[str, ...]:
    """`train`: the first half of a list of words, `eval`: the second half, `all`: the whole."""
    half = (len(words) + 1) // 2
    return {"all": words, "train": words[:half], "eval": words[half:]}[which]
