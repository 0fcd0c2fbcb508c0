"""What the embedded world is written with: names, relations with their sentences, and kinds of questions."""

FEMALE = ("Ada Bea Cora Dina Edda Fay Gwen Hana Ida Jana Kira Lena Mira Nora Olga Pia Rosa Sara Tess Una "
          "Vera Willa Yara Zoe").split()
MALE = ("Abel Boris Carl Dirk Emil Fritz Gus Hugo Ivan Jonas Karl Leon Max Nils Otto Paul Rolf Sven Theo Udo "
        "Viktor Wim Yuri Zeno").split()
FAMILY = ("Adler Brandt Cole Dorn Ebert Falk Gruber Holt Iversen Jansen Keller Lund Mercer Novak Olsen Pohl "
          "Quist Ritter Stone Thorn Ulrich Vogel Weber Yates Zorn Archer Baxter Conrad Draper Ellis Fisher "
          "Garner Hobbs Irving Jarvis Kemp Lowell Marsh Nolan Osborn Parker Quinn Rhodes Sutton Tanner Unwin "
          "Vance Walker").split()
ADJECTIVE = ("Silent Golden Broken Hidden Crimson Distant Empty Frozen Gentle Hollow Iron Jade Last Midnight "
             "Northern Open Pale Quiet Restless Secret Tall Velvet White Young").split()
NOUN = ("Harbor River Mountain Garden Mirror Letter Winter Island Shadow Window Forest Bridge Castle Summer "
        "Voyage Lantern Orchard Desert Tower Valley Storm Ocean Station Promise").split()
ANIMALS = "Wolves Foxes Ravens Tigers Owls Bears Hawks Otters Lions Swans Horses Beetles".split()
COMPASS = "Port Fort Lake Mount Saint New Old Upper Lower East West Great Little High Long Fair".split()
PLACE = ("Alder Linden Maple Willow Cedar Aspen Birch Hazel Rowan Elm Juniper Laurel Poplar Spruce Walnut "
         "Acacia").split()
REALM = ("Velia Torin Marda Kesh Ostra Luria Zembla Quara Nerin Balto Dravia Sylva Morven Tessia Ruvia "
         "Halden").split()
REALM_KIND = "Kingdom Republic Union Duchy".split()
TRADE = "Motors Foods Textiles Press Records Steel Airlines Glass Optics Shipping Paper Chemicals".split()
SCHOOL = "University College Institute Academy Polytechnic School".split()

# type -> (first words, second words, entities per world)
NAMES = {
    "person": (FEMALE + MALE, FAMILY, 460),
    "film": (ADJECTIVE, NOUN, 120),
    "song": (NOUN, ADJECTIVE, 90),
    "book": (NOUN, NOUN, 90),
    "band": (ADJECTIVE, ANIMALS, 60),
    "city": (COMPASS, PLACE, 44),
    "country": (REALM, REALM_KIND, 11),
    "company": (FAMILY, TRADE, 80),
    "university": (PLACE, SCHOOL, 15),
    "label": (ADJECTIVE, TRADE, 30),
}

# (head type, relation) -> (tail type, share of heads that have it, sentence)
# in sentences: {h} head or pronoun, {p} possessive, {t} tail
FACTS = {
    ("person", "date of birth"): ("year", 1., "{h} was born in {t}."),
    ("person", "place of birth"): ("city", .7, "{p} birthplace is {t}."),
    ("person", "country of citizenship"): ("country", .4, "{p} homeland is {t}."),
    ("person", "mother"): ("person", .9, "{p} mother is {t}."),
    ("person", "father"): ("person", .9, "{p} father is {t}."),
    ("person", "spouse"): ("person", .45, "{p} spouse is {t}."),
    ("person", "educated at"): ("university", .25, "{p} school was {t}."),
    ("person", "employer"): ("company", .2, "{p} employer is {t}."),
    ("film", "director"): ("person", 1., "{p} director was {t}."),
    ("film", "composer"): ("person", .6, "{p} composer was {t}."),
    ("film", "publication date"): ("year", .9, "{h} came out in {t}."),
    ("film", "country of origin"): ("country", .7, "{p} origin is {t}."),
    ("song", "performer"): ("band", 1., "{p} performer is {t}."),
    ("song", "composer"): ("person", .7, "{p} composer was {t}."),
    ("song", "publication date"): ("year", .9, "{h} came out in {t}."),
    ("band", "founded by"): ("person", 1., "{p} founder was {t}."),
    ("band", "record label"): ("label", .7, "{p} publisher is {t}."),
    ("band", "country of origin"): ("country", .7, "{p} origin is {t}."),
    ("label", "founded by"): ("person", 1., "{p} founder was {t}."),
    ("label", "inception"): ("year", .9, "{h} was set up in {t}."),
    ("book", "author"): ("person", 1., "{p} author is {t}."),
    ("book", "publisher"): ("company", .7, "{p} publisher is {t}."),
    ("book", "publication date"): ("year", .9, "{h} came out in {t}."),
    ("company", "founded by"): ("person", 1., "{p} founder was {t}."),
    ("company", "inception"): ("year", .9, "{h} was set up in {t}."),
    ("company", "headquarters location"): ("city", .8, "{p} seat is {t}."),
    ("university", "located in"): ("city", 1., "{p} seat is {t}."),
    ("city", "country"): ("country", 1., "{p} country is {t}."),
    ("country", "capital"): ("city", 1., "{p} capital is {t}."),
}
# how questions and demonstrations say a relation: one word each
SPOKEN = {
    "date of birth": "birthdate", "place of birth": "birthplace",
    "country of citizenship": "homeland", "educated at": "school",
    "publication date": "release", "country of origin": "origin",
    "founded by": "founder", "record label": "publisher", "inception": "founding",
    "headquarters location": "seat", "located in": "seat",
}


def spoken(relation):
    """
    >>> spoken("place of birth"), spoken("mother")
    ('birthplace', 'mother')
    """
    return SPOKEN.get(relation, relation)


DOMAIN_OF = {
    "film": "film", "song": "music", "band": "music", "label": "music",
    "book": "literature", "company": "business",
}
INFERENCE = {
    ("mother", "mother"): "maternal grandmother",
    ("mother", "father"): "maternal grandfather",
    ("father", "mother"): "paternal grandmother",
    ("father", "father"): "paternal grandfather",
    ("spouse", "mother"): "mother-in-law",
    ("spouse", "father"): "father-in-law",
}
# first-hop relation of a bridge comparison, by head type
BRIDGES = {"film": "director", "book": "author", "company": "founded by", "song": "composer"}
OLDEST = {
    "person": "was born first",
    "film": "came out first", "song": "came out first", "book": "came out first",
    "company": "was set up first", "label": "was set up first",
}
DATE = {
    "person": "date of birth",
    "film": "publication date", "song": "publication date", "book": "publication date",
    "company": "inception", "label": "inception",
}
SAME_COUNTRY = {
    "person": "country of citizenship", "film": "country of origin", "band": "country of origin",
}
# other words for relations, which no passage uses, for questions that are vaguely put
VAGUE = {
    "date of birth": ("arrival", "age"), "place of birth": ("hometown", "cradle"),
    "country of citizenship": ("nationality", "allegiance"), "mother": ("mum", "parent"),
    "father": ("dad", "begetter"), "spouse": ("partner", "consort"),
    "educated at": ("alma-mater", "classroom"), "employer": ("boss", "paymaster"),
    "director": ("filmmaker", "auteur"), "composer": ("tunesmith", "songwriter"),
    "publication date": ("debut", "premiere"), "country of origin": ("motherland", "soil"),
    "performer": ("singers", "act"), "founded by": ("originator", "pioneer"),
    "record label": ("imprint", "backer"), "inception": ("beginning", "launch"),
    "author": ("writer", "novelist"), "publisher": ("issuer", "printer"),
    "headquarters location": ("base", "address"), "located in": ("site", "whereabouts"),
    "country": ("land", "nation"), "capital": ("metropolis", "government"),
}
# sentences without a fact that name an entity which answers nothing
DISTRACTORS = {
    "person": "{p} friends include {x}.",
    **dict.fromkeys(("film", "song", "book", "band"), "{h} is often compared with {x}."),
    **dict.fromkeys(("company", "label"), "{h} competes with {x}."),
    "city": "{h} is twinned with {x}.",
}

# type -> its share, by hop count; 2-hop and 4-hop questions mix three and two types
MIX = {
    1: {"compositional": 1.},
    2: {"compositional": .5, "inference": .25, "comparison": .25},
    3: {"compositional": 1.},
    4: {"compositional": .5, "bridge_comparison": .5},
}
