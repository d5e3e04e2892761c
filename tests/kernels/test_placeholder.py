"""The first use of a kernel by several threads at once, as in loops over rows."""

import threading
import time
from types import FunctionType

from puna.kernels.cpu.lazy_jit import Placeholder


def test_no_thread_gets_a_kernel_whose_file_still_has_placeholders():
    scope: dict[str, object] = {}
    helping = threading.Event()

    def compile(function):
        if function.__name__ != "called":
            helping.set()
            time.sleep(0.05)  # as long as a compiler takes; the other thread calls meanwhile
        return function

    def code():
        pass

    for name in ("called", "helper", "another"):
        scope[name] = Placeholder(FunctionType(code.__code__, scope, name), compile)
    first, seen = scope["called"], []

    def use():
        first.compiled_function()
        seen.append([name for name in ("called", "helper", "another") if isinstance(scope[name], Placeholder)])

    threads = [threading.Thread(target=use) for _ in range(2)]
    threads[0].start()
    helping.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert seen == [[], []]
