"""The demonstration: a tiny Llama is trained on two ranks, and the pipeline happens to its checkpoints.

``text`` reads the corpus and trains the tokenizer, ``train`` is the training job (a process of its own),
``verl_layout`` writes its checkpoints, ``services`` starts the workflow server (``prefect_server``) and the store,
``published`` reads back what came out at the other end, ``main`` does all this in order and ``story`` tells it.
"""
