"""How long things take (`cost`) and what is worth doing first (`rank`). Pure."""
