"""Starts Python programs as copies of a process that has imported torch and Triton, most of what a short program takes.

``[*python(), "-m", "iris", "info"]`` is a command like ``[sys.executable, "-m", "iris", "info"]``: environment, working
directory, open files, exit status and signals are its own, but its parent is the template. What it starts by
`sys.executable` is copied, too, also by multiprocessing for its ranks. With IRIS_TEST_ALL=1 nothing is copied, and
`python` is ``sys.executable``.

Three processes take part: the template, which has the imports, and forks; its copy, which is the program; and the
command, a small process that hands its own files to the copy, passes on signals, and ends as the copy does. Of programs
that begin with ``import iris`` in one environment there is a template that has imported it, too.
"""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sys

EVERYTHING = os.environ.get("IRIS_TEST_ALL") == "1"
# What takes so long hangs, however many others the machine is busy with.
LIMIT_S = 600
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# In the template's environment, so that a copy can put its own there, where /proc shows it.
ROOM, ROOM_BYTES = "IRIS_TEST_ROOM", 1 << 16

_command = None


def python():
    """The beginning of a command that runs a Python program."""
    global _command
    if EVERYTHING:
        return [sys.executable]
    if _command is None:
        _command = start_template()
    return [_command]


def start_template():
    """Returns the program that has it copied."""
    import shutil
    import subprocess
    import tempfile

    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name of the system's choice, which goes with the socket: unix(7), autobind
    listener.listen()
    folder = tempfile.mkdtemp(prefix="iris-python-")
    program = os.path.join(folder, "python")
    with open(program, "w") as file:
        command = f'"{sys.executable}" -I -S "{__file__}" command {listener.getsockname().hex()}'
        file.write(f'#!/bin/sh\nexec {command} "$@"\n')
    os.chmod(program, 0o700)
    # It ends when its standard input does.
    template = subprocess.Popen(
        [sys.executable, __file__, "template", str(listener.fileno()), program],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
        env={**os.environ, ROOM: " " * ROOM_BYTES},
    )  # fmt: skip
    listener.close()

    def end():
        template.stdin.close()
        template.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return program


# The command ---------------------------------------------------------------------------------------------------------


def command(address, *arguments):
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_inherited(file)]
    with socket.socket(socket.AF_UNIX) as template:
        template.connect(bytes.fromhex(address))
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
        text = json.dumps(request).encode()
        socket.send_fds(template, [len(text).to_bytes(8, "little")], files)
        template.sendall(text)
        answers = template.makefile("rb")
        program = int(answers.readline())
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(program, number))
        status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_inherited(file):
    try:
        return os.get_inheritable(file)
    except OSError:  # that of the listing, which is over
        return False


# The template --------------------------------------------------------------------------------------------------------


def serve(listener):
    """Fork for each command. Returns in the copies, what each of them is to run."""
    import gc
    import selectors

    import numpy  # noqa: F401
    import torch.distributed  # noqa: F401
    import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401

    gc.freeze()  # what a collection touches is no longer shared with the copies
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    with_iris, has_iris = {}, False
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) is not key:
                continue  # a program and its command have ended at the same time
            if key.fileobj == 0:
                os._exit(0)
            elif key.fileobj is listener:
                connection, files, request = accept(listener, has_iris)
                settings = None if has_iris or not request else settings_of_iris(**json.loads(request))
                if settings is not None:
                    if settings not in with_iris:
                        its, with_iris[settings] = socket.socketpair()
                        if os.fork() == 0:
                            close_all(selector, connection, *files, *with_iris.values())
                            selector, listener, has_iris = selectors.DefaultSelector(), its, True
                            selector.register(its, selectors.EVENT_READ)
                            import_iris(**json.loads(request))
                            gc.freeze()
                            break
                        its.close()
                    pass_on(with_iris[settings], connection, files, request)
                    continue
                program = os.fork() if request else None
                if program == 0:
                    request = json.loads(request)
                    # Before others have their numbers, which they would close at their own end.
                    close_all(selector, connection, *with_iris.values())
                    open_as(files, request.pop("files"))
                    return request
                for file in files:
                    os.close(file)
                if program is None:
                    connection.close()
                else:
                    answer(connection, program)
                    selector.register(os.pidfd_open(program), selectors.EVENT_READ, (program, connection))
                    selector.register(connection, selectors.EVENT_READ, program)
            elif isinstance(key.data, int):
                os.kill(key.data, signal.SIGKILL)  # the command has been killed
                selector.unregister(key.fileobj)
            else:
                program, connection = key.data
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                if connection in selector.get_map():
                    selector.unregister(connection)
                answer(connection, os.waitpid(program, 0)[1])
                connection.close()


def accept(listener, has_iris):
    """The connection to a command, its files and its request: of the command, or from the template without iris."""
    if not has_iris:
        connection, _ = listener.accept()
        return connection, *receive(connection)
    files, request = receive(listener)
    if not request:
        os._exit(0)  # the template has ended
    return socket.socket(fileno=files[0]), files[1:], request


def pass_on(template, connection, files, request):
    """To another template, which does what is left to do."""
    socket.send_fds(template, [len(request).to_bytes(8, "little")], [connection.fileno(), *files])
    template.sendall(request)
    connection.close()
    for file in files:
        os.close(file)


PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What iris and Triton read when they are imported, and torch; but by whom iris is watched, each copy reads for itself.
WATCHED = ("IRIS_SANITIZE", "IRIS_TRACE_FOLDER", "IRIS_COMMANDS")
READ_AT_IMPORT = ("IRIS_", "TRITON_", "TORCH_", "PYTORCH_", "CUDA_", "HIP_", "ROCR_", "PYTHON")
IMPORTS_IRIS = re.compile(r"^(import|from) iris\b", re.MULTILINE)


def settings_of_iris(arguments, environment, folder, **_):
    """What the import of iris depends on, if this program begins with it, and it does nothing but define things."""
    settings = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    if settings.get("IRIS_SANITIZE", "0") not in ("", "0", "1"):
        return None  # which is refused by the import
    settings = {name: value for name, value in settings.items() if not name.startswith(WATCHED)}
    paths = settings.get("PYTHONPATH", "").split(os.pathsep)
    in_project = [os.path.commonpath([PROJECT, os.path.abspath(path)]) == PROJECT for path in paths]
    if "PYTHONPATH" not in settings or not all(in_project):
        return None  # it may be another iris
    if any(name.startswith("IRIS_") and os.sep in settings[name] for name in settings):
        return None  # folders are other ones each time
    first, *rest = [each for each in arguments if each not in ("-u", "-B")] or [""]
    if first == "-m":
        begins = rest[:1] == ["iris"]
    elif first == "-c":
        begins = rest[0].startswith("from multiprocessing.spawn ") or "main(" in rest[0] and "['iris']" in rest[0]
    else:
        try:
            with open(os.path.join(folder, first)) as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            return None
        found = IMPORTS_IRIS.search(text)
        # Before a kernel is defined, and before the program changes its environment.
        begins = found and not re.search(r"\bjit\b|environ|sys\.", text[: found.start()])
    return tuple(sorted(settings.items())) if begins else None


def import_iris(environment, **_):
    """As the program would. What cannot be imported, it will try itself, and says why."""
    import multiprocessing

    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if not name.startswith(WATCHED)})
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [sys.path[0], *filter(None, paths), *(path for path in sys.path[1:] if path not in paths)]
    # What iris says at its import, once, each copy says that is the first process of its program.
    process = multiprocessing.current_process()
    process.name, name = "template", process.name
    before = set(sys.modules)
    try:
        import iris  # noqa: F401
    except BaseException:
        for module in set(sys.modules) - before:
            del sys.modules[module]
    process.name = name


def receive(connection):
    """The command's files and its request, which is empty if it was killed before it had said all."""
    files, text = [], b""
    try:
        head, files, _, _ = socket.recv_fds(connection, 8, 250)
        length = int.from_bytes(head, "little")
        while len(text) < length:
            part = connection.recv(length - len(text))
            if not part:
                return files, b""
            text += part
    except OSError:
        text = b""
    return files, text


def answer(connection, number):
    with contextlib.suppress(OSError):  # the command has been killed
        connection.sendall(f"{number}\n".encode())


def close_all(selector, *others):
    """A template's files, but standard input, in a copy."""
    for each in [*others, *(key.fileobj for key in selector.get_map().values())]:
        if not isinstance(each, int):
            each.close()
        elif each > 0:
            os.close(each)
    selector.close()


def open_as(files, numbers):
    """These files, under these numbers, and no others."""
    import fcntl

    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for other in map(int, os.listdir("/proc/self/fd")):
        if other < 1000:
            with contextlib.suppress(OSError):  # that of the listing, which is over
                os.close(other)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(arguments, environment, folder):
    """Make this process what ``python *arguments`` would be, and run its program."""
    import multiprocessing
    import random
    import runpy
    import types

    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path[1:] if path not in paths]
    os.environ.clear()
    os.environ.update(environment)
    show_environment(environment)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder
    random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in set(PASSED_ON) - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    while arguments[0] in ("-u", "-B"):
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)
    first, *rest = arguments
    if "iris.mode" in sys.modules and first != "-c":
        sys.modules["iris.mode"]._decide()
    if "iris.sanitizer" in sys.modules:
        sys.modules["iris.sanitizer"].prepare_process()
    begins = {"-c": "", "-": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.realpath(first)))
    sys.path[:] = [begins, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    multiprocessing.set_executable(sys.executable)
    if first == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])
        return
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    elif first == "-":
        sys.argv[:] = ["-", *rest]
        code = compile(sys.stdin.read(), "<stdin>", "exec")
    else:
        sys.argv[:] = [first, *rest]
        main.__file__ = os.path.abspath(first)
        with open(first, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


def show_environment(environment):
    """In /proc, where the environment with which a process was started stands (proc_pid_environ(5))."""
    import ctypes

    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def status_of(program):
    """The exit status with which Python would end."""
    try:
        program()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            return ended.code
        if ended.code is not None:
            print(ended.code, file=sys.stderr)
        return ended.code is not None
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(status):
    """What Python does at its end but take all modules apart, which takes longer than most programs."""
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or it is closed
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    if sys.argv[1] == "command":
        command(*sys.argv[2:])
    else:
        request = serve(socket.socket(fileno=int(sys.argv[2])))
        sys.executable = sys.argv[3]
        end(status_of(lambda: become(**request)))
