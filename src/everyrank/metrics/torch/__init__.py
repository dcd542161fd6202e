"""How declared metrics live in torch: open numbers, the cycle of a window, syncs, checkpoints."""
