"""What an operator changes of a conversation between two turns: undo, reset (docs/design/turns.md section 11)."""
