"""The end of the process: what is called when it ends, and that it ends as it would without us. Real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.children import Child, Result, environment, run

PRELUDE = """
import atexit, ctypes, os, signal, sys, threading, time
from otel_dl.lifecycle import Ending
from otel_dl.settings import Settings

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def end(delay, error):
    say("end", delay, type(error).__name__)

def flush(delay):
    say("flush", delay)

def never_back_in_the_interpreter():
    # A mutex that is locked twice: no signal interrupts this wait, as none interrupts a collective's.
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    say("waiting")
    libc.pthread_mutex_lock(mutex)

ending = Ending(end, Settings(), flush)
"""


def script(body: str) -> str:
    return PRELUDE + textwrap.dedent(body)


def ended(body: str, number: int | None = None, timeout: float = 30) -> Result:
    """`body` run to its end; where `number` is given it gets that signal once it has printed `waiting`."""
    if number is None:
        return run(script(body), timeout=timeout)
    child = Child(script(body))
    child.wait_for_line("waiting")
    child.send(number)
    return child.finish(timeout)


class TestOrdinaryEnds:
    @pytest.mark.parametrize(
        ("last", "code", "error"),
        [
            ("pass", 0, "NoneType"),
            ("raise ValueError", 1, "ValueError"),
            ("sys.exit(3)", 3, "NoneType"),
            ("sys.exit('no')", 1, "NoneType"),
            ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ],
    )
    def test_the_end_is_told_the_exception_and_leaves_the_exit_code(self, last: str, code: int, error: str) -> None:
        result = ended(f"ending.install()\n{last}")
        assert result.stdout == f"end 5.0 {error}\n"
        assert result.code == code == run(f"import sys\n{last}").code

    def test_sigint_is_pythons(self) -> None:
        result = ended("ending.install()\nsay('waiting')\ntime.sleep(30)", signal.SIGINT)
        assert (result.code, result.stdout) == (-signal.SIGINT, "waiting\nend 5.0 KeyboardInterrupt\n")

    def test_what_the_end_imports_does_not_make_the_interpreter_forget_a_sigint(self) -> None:
        # An `exec` of a text, as in `dataclasses`, makes it leave with 1 instead.
        body = "def end(delay, error): exec('pass')\nEnding(end, Settings()).install()\nraise KeyboardInterrupt"
        assert ended(body).code == -signal.SIGINT

    def test_it_comes_before_what_registered_earlier(self) -> None:
        assert ended("atexit.register(say, 'theirs')\nending.install()").stdout == "end 5.0 NoneType\ntheirs\n"

    def test_an_exception_of_an_interactive_past_does_not_count(self) -> None:
        assert ended("sys.last_value = ValueError()\nending.install()").stdout == "end 5.0 NoneType\n"

    def test_a_fault_of_ours_is_logged_and_changes_nothing(self) -> None:
        result = ended("def end(delay, error): raise KeyError('ours')\nEnding(end, Settings()).install()\nsys.exit(4)")
        assert result.code == 4
        assert result.stderr.count("KeyError: 'ours'") == 1

    def test_without_install_nothing_happens(self) -> None:
        assert ended("say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)").stdout == "True\n"

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    @pytest.mark.parametrize(("last", "error"), [("pass", "NoneType"), ("raise ValueError", "ValueError")])
    def test_children_of_multiprocessing_end_once(self, method: str, last: str, error: str, tmp_path: Path) -> None:
        program = tmp_path / "program.py"
        program.write_text(
            script(f"""
                import multiprocessing
                def child():
                    ending.install()
                    {last}
                if __name__ == "__main__":
                    process = multiprocessing.get_context("{method}").Process(target=child)
                    process.start()
                    process.join()
                    say("exit code", process.exitcode)
            """)
        )
        if sys.version_info >= (3, 13):
            error = "NoneType"  # multiprocessing has dealt with the exception by then
        done = subprocess.run([sys.executable, str(program)], env=environment({}), capture_output=True, text=True)
        code = 0 if last == "pass" else 1
        assert done.stdout == f"end 5.0 {error}\nexit code {code}\n", done.stderr


class TestSigtermWithItsDefaultAction:
    @pytest.mark.parametrize(
        "wait",
        [
            "say('waiting')\nwhile True: sum(range(100))",
            "say('waiting')\ntime.sleep(30)",
            "never_back_in_the_interpreter()",
        ],
    )
    def test_what_was_kept_leaves_and_the_process_dies_by_the_signal(self, wait: str) -> None:
        result = ended(f"ending.install()\n{wait}", signal.SIGTERM)
        assert (result.code, result.stdout) == (-signal.SIGTERM, "waiting\nend 0.5 NoneType\n")
        assert result.ending < 1

    @pytest.mark.parametrize("wait", ["say('waiting')\ntime.sleep(30)", "never_back_in_the_interpreter()"])
    def test_an_end_that_does_not_come_back_does_not_hold_it(self, wait: str) -> None:
        body = f"def end(delay, error): time.sleep(30)\nending = Ending(end, Settings())\nending.install()\n{wait}"
        result = ended(body, signal.SIGTERM)
        assert result.code == -signal.SIGTERM
        assert result.ending < 1.5

    def test_a_lock_that_the_main_thread_holds_does_not_hold_it(self) -> None:
        result = ended(
            """
            lock = threading.Lock()
            def end(delay, error):
                with lock: say("never")
            Ending(end, Settings()).install()
            with lock:
                say("waiting")
                while True: sum(range(100))
            """,
            signal.SIGTERM,
        )
        assert (result.code, result.stdout) == (-signal.SIGTERM, "waiting\n")
        assert result.ending < 1.5

    def test_it_works_while_the_end_waits_at_exit(self) -> None:
        result = ended(
            "def end(delay, error):\n  say('waiting')\n  time.sleep(30)\nEnding(end, Settings()).install()",
            signal.SIGTERM,
        )
        assert result.code == -signal.SIGTERM
        assert result.ending < 1.5

    def test_it_works_with_a_wakeup_descriptor_of_somebody_elses(self) -> None:
        result = ended(
            """
            import asyncio
            async def main():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, say, "theirs")
                ending.install()
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.sleep(0.1)
                say("waiting")
                await asyncio.sleep(30)
            asyncio.run(main())
            """,
            signal.SIGTERM,
        )
        assert (result.code, result.stdout) == (-signal.SIGTERM, "theirs\nwaiting\nend 0.5 NoneType\n")
        assert result.ending < 1.5

    def test_outside_the_main_thread_the_signal_keeps_its_own_action(self) -> None:
        result = ended(
            "t = threading.Thread(target=ending.install); t.start(); t.join(); say('waiting'); time.sleep(30)",
            signal.SIGTERM,
        )
        assert (result.code, result.stdout) == (-signal.SIGTERM, "waiting\n")


class TestSigtermOfTheUsers:
    """Python calls their handler when and where it would without us, and it alone decides the end."""

    HANDLER = """
def theirs(number, frame):
    say("theirs", threading.current_thread() is threading.main_thread())
    time.sleep(0.2)
    {decision}
"""

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_it_may_go_on(self, order: str) -> None:
        first, second = "signal.signal(signal.SIGTERM, theirs)", "ending.install()"
        if order == "after":
            first, second = second, first
        body = (
            self.HANDLER.format(decision="say('goes on')")
            + f"{first}\n{second}\nsay('waiting')\ntime.sleep(1)\nsay('went on')"
        )
        result = ended(body, signal.SIGTERM)
        lines = result.stdout.splitlines()
        assert result.code == 0
        assert sorted(lines[1:3]) == ["flush 0.5", "theirs True"]
        assert lines[3:] == ["goes on", "went on", "end 5.0 NoneType"]

    def test_it_may_exit(self) -> None:
        body = "ending.install()" + self.HANDLER.format(decision="sys.exit(7)")
        result = ended(body + "signal.signal(signal.SIGTERM, theirs)\nsay('waiting')\ntime.sleep(30)", signal.SIGTERM)
        assert result.code == 7
        assert result.stdout.splitlines()[-1] == "end 5.0 NoneType"

    def test_one_that_calls_what_was_there_before_decides_the_end_itself(self) -> None:
        """Without us there is nothing to be called, and the handlers that try see to that."""
        body = "ending.install()" + self.HANDLER.format(decision="before(number, frame)")
        body += "before = signal.signal(signal.SIGTERM, theirs)\nsay('waiting')\ntime.sleep(0.5)\n"
        result = ended(body, signal.SIGTERM)
        assert result.code == 0
        assert result.stdout.splitlines()[-1] == "end 5.0 NoneType"

    def test_ignored_stays_ignored(self) -> None:
        body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nending.install()\nsay('waiting')\ntime.sleep(0.5)"
        assert ended(body + "\nsay('done')", signal.SIGTERM).stdout == "waiting\ndone\nend 5.0 NoneType\n"


class TestForks:
    def test_a_child_has_the_action_and_the_descriptor_it_would_have_without_us(self) -> None:
        result = ended("""
            ending.install()
            if os.fork() == 0:
                say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
                say("mask", signal.pthread_sigmask(signal.SIG_BLOCK, ()))
                sys.exit(0)  # runs atexit, in which nothing of ours is left
            os.wait()
        """)
        assert result.stdout == "True -1\nmask set()\nend 5.0 NoneType\n"

    def test_a_handler_of_the_users_stays_in_the_child(self) -> None:
        result = ended("""
            signal.signal(signal.SIGTERM, lambda *_: say("theirs"))
            ending.install()
            if os.fork() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            os.wait()
        """)
        assert result.stdout == "theirs\nend 5.0 NoneType\n"

    def test_terminating_forked_children_at_any_moment_ends_them_only(self) -> None:
        result = ended("""
            ending.install()
            codes = []
            for number in range(300):
                child = os.fork()
                if not child:
                    time.sleep(30)
                time.sleep(number % 4 / 10_000)
                os.kill(child, signal.SIGTERM)
                codes.append(os.waitpid(child, 0)[1])
            say(set(codes))
        """)
        assert result.stdout == f"{{{int(signal.SIGTERM)}}}\nend 5.0 NoneType\n"

    def test_a_child_of_multiprocessing_that_is_terminated(self) -> None:
        result = ended("""
            import multiprocessing
            ending.install()
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
            child.start()
            child.terminate()
            child.join()
            say(child.exitcode)
        """)
        assert result.stdout == "-15\nend 5.0 NoneType\n"

    def test_a_child_that_begins_steps_of_its_own_is_watched_as_well(self) -> None:
        result = ended("""
            ending.install()
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                ending.install()
                os.write(writing, b"!")
                time.sleep(30)
            os.read(reading, 1)
            os.kill(child, signal.SIGTERM)
            say("child", os.waitpid(child, 0)[1])
        """)
        assert result.stdout == f"end 0.5 NoneType\nchild {int(signal.SIGTERM)}\nend 5.0 NoneType\n"


class TestUninstall:
    def test_it_puts_back_exactly_what_was_there(self) -> None:
        result = ended("""
            def state():
                wakeup = signal.set_wakeup_fd(-1)
                signal.set_wakeup_fd(wakeup)
                return signal.getsignal(signal.SIGTERM), wakeup, threading.active_count(), os.listdir("/proc/self/fd")
            before = state()
            ending.install()
            assert state() != before
            ending.uninstall()
            say(state() == before)
        """)
        assert result.stdout == "True\n", "and the end of the process calls nothing"

    def test_what_somebody_set_since_stays(self) -> None:
        result = ended("""
            def theirs(*_): pass
            ending.install()
            signal.signal(signal.SIGTERM, theirs)
            ending.uninstall()
            say(signal.getsignal(signal.SIGTERM) is theirs)
        """)
        assert result.stdout == "True\n"

    def test_a_handler_that_somebody_still_calls_does_nothing(self) -> None:
        result = ended(
            """
            ending.install()
            before = signal.getsignal(signal.SIGTERM)
            ending.uninstall()
            signal.signal(signal.SIGTERM, lambda *_: before(*_))
            say("waiting")
            time.sleep(0.5)
            """,
            signal.SIGTERM,
        )
        assert (result.code, result.stdout) == (0, "waiting\n")

    def test_it_can_be_installed_again(self) -> None:
        body = "ending.install()\nending.uninstall()\nending.install()\nsay('waiting')\ntime.sleep(30)"
        assert ended(body, signal.SIGTERM).stdout == "waiting\nend 0.5 NoneType\n"
