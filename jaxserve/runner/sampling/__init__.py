"""The parts of the sampler: blocks of the vocabulary, integer weights, filters, penalties,
logprobs.
"""
