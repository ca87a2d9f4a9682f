"""Holds a conversation; what was read before is not computed again.

Usage: chat.py BUNDLE
"""

import sys

from dspark.runtime import Conversation, DSparkInference, SamplingParams

with DSparkInference.load(sys.argv[1]) as model:
    conversation = Conversation(model, system="You are brief.")
    for line in sys.stdin:
        for chunk in conversation.reply(line.strip(), SamplingParams(max_new_tokens=64)):
            print(chunk.text, end="", flush=True)
        print(f"\n({conversation.reused_tokens} tokens were cached)")
