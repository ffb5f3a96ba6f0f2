"""Names and row orders of code bases that train models of their own: torchtitan, torchtune, litgpt, Meta's Llama.

``rules`` says what a table is made of, ``torchtitan``, ``torchtune`` and ``litgpt`` are the tables, ``rename`` applies
them to a plan. A new family is a table.
"""
