"""Reward functions that misbehave in worker processes. Imports here are quick: each worker repeats them."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor


def obey(prompts, completions, completion_ids, answer, **columns):
    """Does what the completion says."""
    (what,) = completions  # one sample at a time
    print("what a function prints must not get in the way")
    if what == "hang":
        time.sleep(60)
    if what == "exit":
        os._exit(3)
    if what == "ctrl-c":
        os.kill(os.getpid(), signal.SIGINT)
    if what == "terminate":  # as a scheduler does to all processes of a job
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    if what == "raise":
        raise KeyError("judge")
    if what == "none":
        return [None]
    if what == "shout":
        raise ValueError("a" * 1_000_000)
    return [len(what) + answer[0] + len(completion_ids[0]) / 10]


def has_token(completions, **columns):
    """1 where the environment has the token that the completion names, also as the kernel shows it."""
    (name,) = completions
    with open("/proc/self/environ", "rb") as environment:
        return [float(name in os.environ or name.encode() in environment.read())]


def has_imported(completions, **columns):
    return [float(completions[0] in sys.modules)]


def meet(completions, **columns):
    """Waits until two calls have begun."""
    folder = os.path.dirname(completions[0])
    open(completions[0], "w").close()
    deadline = time.monotonic() + 30
    while len(os.listdir(folder)) < 2:
        if time.monotonic() > deadline:
            return [None]
        time.sleep(0.01)
    return [1.0]


def answer_and_exit(completions, **columns):
    threading.Timer(0.2, os._exit, [3]).start()
    return [1.0]


def answer_twice(completions, **columns):
    if completions == ["fork"] and os.fork() == 0:
        time.sleep(0.2)
        return [9.0]
    return [1.0]


def scribble(completions, **columns):
    for name in os.listdir("/dev/fd"):
        if os.path.exists(f"/dev/fd/{name}") and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            os.write(int(name), completions[0].encode())  # it is the pipe to the trainer
    return [1.0]


def start_others(completions, **columns):
    """Starts two processes that sleep for a minute, and waits for the second."""
    for wait in (False, True):
        child = subprocess.Popen(["sleep", "60"])
        with open(completions[0], "a") as pids:
            pids.write(f"{child.pid}\n")
        if wait:
            child.wait()


def start_another_session(completions, **columns):
    """Starts a process in a session of its own, whose parent then ends, and answers or ends as it is told."""
    path, what = completions[0].split()
    subprocess.run(["sh", "-c", f"setsid sleep 60 & echo $! $$ > {path}"], start_new_session=True, check=True)
    if what == "exit":
        os._exit(3)
    return [1.0]


def never_rest(completions, **columns):
    """Starts a process, and is then busy in C, which stops all Python threads."""
    child = subprocess.Popen(["sleep", "60"])
    with open(completions[0], "w") as pids:
        pids.write(f"{os.getpid()} {child.pid}")
    re.match("(a|a)*b", "a" * 60)


def terminate_a_child(completions, **columns):
    """Seconds until SIGTERM ends a child that sleeps for a minute."""
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    started = time.monotonic()
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    return [time.monotonic() - started]


def exit_for_sun(prompts, completion_ids, **columns):
    if "sun" in prompts:
        os._exit(9)
    return even_share(completion_ids)


def even_share(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def count_tokens(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def count_calls(completions, **columns):
    count_calls.calls += 1
    return [float(count_calls.calls)]


count_calls.calls = 0


def in_a_pool(completions, **columns):
    with ProcessPoolExecutor(1) as pool:
        return list(pool.map(len, completions))
