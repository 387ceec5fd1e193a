"""From the text of a bundle's documents to its plan: what is wrong with them, and what they describe. Pure."""
