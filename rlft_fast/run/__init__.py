"""A run of any trainer: its loop, and everything in its folder.

protocol    what a run drives: a trainer and its models
progress    how far a run has come, as its checkpoints hold it
run         `Run`: the loop around a trainer's steps, with checkpoints, weights and summary
folder      which run a folder belongs to, and which settings a resumed run must share with that run
lock        one run at a time writes to a folder
log         numbers and samples as JSON lines, and what is shown
tokens      numbers of every token of a step
trackers    TensorBoard, Weights & Biases, Trackio and MLflow
phases      time, memory and waiting in the parts of a step
plot        curves of runs

The names that users need are names of `rlft_fast.trainer`.
"""
