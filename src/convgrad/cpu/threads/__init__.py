"""The threads that run a kernel: how many (count), who runs it (team), and the generated fork-join itself (team_ir)."""
