"""The closed classes of English: words that hold a sentence together and name nothing."""

from __future__ import annotations

ARTICLES = "a an the this that these those"
PRONOUNS = """
i me my mine myself we us our ours ourselves you your yours yourself yourselves thou thee thy thine ye he him his
himself she her hers herself it its itself they them their theirs themselves who whom whose which what whoever
whatever whichever one oneself each other another some any none both either neither all many much few several such
own same somebody someone something anybody anyone anything nobody nothing everybody everyone everything
"""
PREPOSITIONS = """
about above across after against along amid among amongst around as at before behind below beneath beside besides
between beyond by despite down during except for from in inside into like near of off on onto out outside over past
per since through throughout till to toward towards under underneath until unto up upon via with within without
"""
CONJUNCTIONS = """
and but or nor so yet if because although though unless while whereas whether than when whenever where wherever how
why once lest hence thus therefore however moreover
"""
VERBS = """
am is are was were be been being have has had having do does did doing done can could may might must shall should
will would ought need cannot
"""
ADVERBS = "not no there here then now too very also just only even ever never more most less least quite rather again"

FUNCTION_WORDS = frozenset(" ".join((ARTICLES, PRONOUNS, PREPOSITIONS, CONJUNCTIONS, VERBS, ADVERBS)).split())
"""Articles, pronouns, prepositions, conjunctions, auxiliary verbs and the commonest adverbs, in lower case."""


def is_function_word(word: str) -> bool:
    """Whether a word in lower case is a function word, alone or with a clitic: don't, it's, they've."""
    stem, _, clitic = word.partition("'")
    return word in FUNCTION_WORDS or word.endswith("n't") or (bool(clitic) and stem in FUNCTION_WORDS)
