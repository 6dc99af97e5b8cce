"""The agent as a process: run it, ask how it is, talk to it, collect what a maintainer asks for."""
