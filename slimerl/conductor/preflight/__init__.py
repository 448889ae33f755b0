"""What is checked before anything starts: the spec against its files and this machine.

    paths     what the file system refuses: permissions, links, names
    scored    models with a scalar head: the critic's, a reward model's
    model     config.json, the trainer's and the engines' layout, the checkpoint's tensors
    data      tokenizer, vocabulary, every row of every data file
    agent     its tools, sandbox, functions and environment
    reward    what judges responses: sandbox, functions, rubrics, tests of the data
    disk      directories that can be written, and hold what the run writes
    machine   versions, GPUs, port, memory
    whole     all of these, one after the other

Flows in: a valid `RunSpec`. Flows out: one line per fault, each naming the key and the way out; none: it can start.
Invariant: nothing is started and nothing is left on the disk.
"""
