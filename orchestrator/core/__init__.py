"""What decides: pure functions on plain values. Nothing in here reads a clock, opens a file or logs."""
