"""Makes groups: a request becomes completions with rewards. Nothing here knows how training uses
them."""
