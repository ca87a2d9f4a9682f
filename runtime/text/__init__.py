"""Between text and token ids: tokenizer, chat template, and the text of a growing output.

Imports errors only.
"""
