"""Skills: what their SKILL.md says is in `skill_text`, which only those import who read one."""
