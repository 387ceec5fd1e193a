"""What extensions register, see and give back, without their calls: all of it is pure."""
