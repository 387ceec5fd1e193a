"""What a person does with messages that were given up: show, requeue, drop (docs/design/delivery.md section 10)."""
