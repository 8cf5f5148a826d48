"""Common English nouns to draw from: short, concrete, and one or two tokens for most tokenizers."""

__all__ = ["WORDS"]

_NOUNS = """
    acorn anchor apple arrow attic bacon badge balloon banjo barrel basket beach beard bell belt bench berry bird
    blanket boat bone book boot bottle bowl branch bread brick bridge broom brush bucket bull butter button cabin
    cactus cage cake camel camera canal candle canoe canyon carpet carrot castle cave chain chair chalk cherry chest
    circus clay cliff clock cloud clover coat coin comet cookie copper coral cottage cotton cow crab cradle crane
    crow crown curtain desk diamond dice dish dolphin donkey door dragon drawer drum duck dust eagle elbow engine
    fairy feather fence ferry fiddle field finger flag flame flute foam forest fork fountain fox frog garden garlic
    gate ghost giant ginger glass glove goat grape gravel guitar hammer harbor hat hawk helmet hill honey hook horn
    horse igloo ink island ivy jacket jar jewel jungle kettle key kite kitten knee knife ladder lake lamp lantern
    leaf lemon letter lily lion lizard lock log magnet map maple marble market mask meadow melon mill mirror mole
    monkey moon moss moth mountain mouse museum needle nest nickel oak ocean olive onion orange orchard otter oven
    owl paddle painter palace panda paper parrot peach pearl pebble pencil pepper piano pillow pilot pine pirate
    planet plum pocket pond pony potato prince pump pumpkin puzzle queen quilt rabbit radio raft rain ribbon rice
    ring river road robin rocket roof rope rose ruby saddle sail salt sand scarf school seal shadow shark
    sheep shell ship shoe shovel silk silver sink skate snail snake soap sock spider spoon spring squirrel stable
    star statue stone stove straw sugar sunset swan sword table tail tent thorn throne tiger toad tomato torch towel
    tower train tree trumpet tulip tunnel turtle valley vase velvet village vine violin wagon wall walnut water
    whale wheat wheel whistle willow window winter wizard wolf wool yarn zebra
"""
WORDS = tuple(_NOUNS.split())
