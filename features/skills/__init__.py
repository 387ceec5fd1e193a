"""Skills: folders with a SKILL.md that agents find and work in (docs/skills.md)."""
