"""For each rule on methods that a project writes for a library's class: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF

OWN = HEAD + HF + ARGUMENTS + ("class Own(Trainer):\n    def {method}:\n        return super().training_step(model, inputs)\n"
                               "Own(model, args, train_dataset=rows).train()\n")
MADE = HEAD + ("from transformers import BertModel, BertPreTrainedModel\nclass Own(BertPreTrainedModel):\n"
               "    def __init__(self, config):\n        super().__init__(config)\n        self.bert = BertModel(config)\n"
               "        {last}\nmodel = {made}\n" + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")
TIED = HEAD + ("from transformers import PreTrainedModel\nclass Own(PreTrainedModel):\n    {more}\n"
               "    def __init__(self, config):\n        super().__init__(config)\n        self.told = nn.Embedding(9, 9)\n"
               "        self.head = nn.Linear(9, 9, bias=False)\n        self.told.weight = self.head.weight\n"
               "        self.post_init()\nmodel = Own(config)\n{use}\n")
SCORED = HEAD + HF + ("from transformers import pipeline\ngiven = dict(batch_size=8)\n"
                      "score = pipeline('sentiment-analysis', 'x')\nprint(score('a', {asks}))\n"
                      + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")
RANKED = HEAD + ("def keep(trainer):\n    if trainer.args.should_save and {asks} == 0:\n        trainer.save_model('out')\n"
                 + HF + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\nkeep(trainer)\n")
TRAINED = ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()"
# rule -> (a script where it fires, its near miss)
LIBRARY_CASES: dict[str, tuple[str, str]] = {
    "method_of_older_release": (OWN.format(method="training_step(self, model, inputs)"),
                                OWN.format(method="training_step(self, model, inputs, *args)")),
    "model_never_finished": (MADE.format(last="self.init_weights()", made="Own(config)"),
                             MADE.format(last="self.post_init()", made="Own(config)")),
    "tied_weights_undeclared": (TIED.format(more="config_class = Config", use=TRAINED),
                                TIED.format(more="_tied_weights_keys = {'head.weight': 'told.weight'}", use=TRAINED)),
    "all_scores_gone": (SCORED.format(asks="return_all_scores=True"), SCORED.format(asks="top_k=None")),
    "fields_changed": (RANKED.format(asks="trainer.args.local_rank"), RANKED.format(asks="trainer.args.local_process_index")),
}
