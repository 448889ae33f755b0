"""SGLang from outside: launch, talk to, and update servers. The code that runs inside one is in `inside/`.

Flows in: the spec (`launcher`), token ids (`client`), steps of a weight update (`fleet`). Flows out: tokens with
logprobs and weight versions. Invariant: every call has a deadline and an error that names engine and endpoint.
"""
