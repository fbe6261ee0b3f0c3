"""A hand-written English-German grammar.

`lexicon` holds the words, `german` and `english` build phrases and clauses, `phrases` joins the two languages,
`sampling` draws what makes sense, and `sentences` has one function per construction.
"""
