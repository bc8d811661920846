"""verl's trainer over a Gyre fleet: verl trains, and asks the fleet's door for samples.

| module | |
| --- | --- |
| `main` | `gyre-verl`, verl's `main_ppo` with a fleet |
| `plugin` | what verl loads in each of its processes, by the entry point `verl.plugins` |
| `trainer` | verl's trainer, which publishes its weights after each step |
| `client` | verl's client of its servers, which asks the door instead |
| `weights` | verl's checkpoint engine, which writes a folder, or |
| `plane` | serves its versions itself, on the fleet's weight plane |
| `door` | the door's HTTP, and what to do when it is away |
| `backend` | the other way round: verl's workers as a back end of Gyre's jobs |
| `testing` | a device on CPUs, for tests |
"""
