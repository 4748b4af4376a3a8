"""Notices reach real servers and real programs; what does not answer holds nobody up, and no secret is written anywhere."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from harness import Notes, processes_of, wait_until
from webhook import serving

from kgorch.core.session.notification_policy import Notice
from kgorch.errors import PlanError
from kgorch.plan import NotifySection
from kgorch.services import notification_targets, notifications
from kgorch.services.notifications import Notifier
from kgorch.system import process_identity
from kgorch.system.redaction import public_form

SECRET = "s3cr3t-t0ken-9f2c"
FINISHED = Notice(("finished",), "the run is finished", {"why": ""})


@pytest.fixture
def hook():
    with serving() as made:
        yield made


@pytest.fixture
def telling(tmp_path, monkeypatch):
    """Makes a Notifier of a [notify] part, whose tries follow each other quickly."""
    monkeypatch.setattr(notifications, "FIRST_RETRY_S", 0.02)
    made: list[Notifier] = []

    def make(environ=None, **part) -> Notifier:
        made.append(Notifier(NotifySection(on=["finished", "saved"], **part), "ink", tmp_path, Notes(), environ))
        return made[-1]

    yield make
    for item in made:
        item.stop()


def sent(made: Notifier, notice: Notice = FINISHED, **facts) -> list[tuple[str, dict]]:
    """Tell it, wait until it has arrived or was given up; what the journal is told of it."""
    made.tell(notice, **facts)
    wait_until(lambda: not made.is_busy)
    return [made._note.get() for _ in range(made._note.qsize())]


def script(folder: Path, text: str) -> list[str]:
    path = folder / "hook.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def refusing_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_webhook_gets_the_notice_as_json(telling, hook):
    made = telling(urls=[f"{hook.url}/x"])
    assert sent(made, stage="train", step=40, session=2, metrics={"dice": 0.5, "bad": float("nan")}) == []
    [body] = hook.got
    assert (body["event"], body["run"], body["step"], body["session"], body["stage"]) == (
        "finished",
        "ink",
        40,
        2,
        "train",
    )
    assert body["metrics"] == {"dice": 0.5, "bad": None} and body["title"] == "kgorch: ink finished at step 40"
    assert "dice 0.5" in body["text"] and body["at"].endswith("Z")


def test_a_server_that_fails_for_a_while_is_tried_again_and_the_journal_stays_quiet(telling, hook):
    hook.replies = [500, 503, 429]
    assert sent(telling(urls=[hook.url])) == []
    assert hook.events == ["finished"] and len(hook.asked) == 4


def test_what_goes_on_failing_is_given_up_noted_once_and_noted_again_when_it_arrives(telling, hook):
    hook.replies = [500] * 10
    made = telling(urls=[hook.url])
    [(kind, facts)] = sent(made)
    assert kind == "notices_failed" and facts["failing"] == {hook.url: "HTTP 500"}
    assert len(hook.asked) == notifications.TRIES
    assert sent(made) == [], "the same cause is no news"
    assert [kind for kind, _ in sent(made)] == ["notices_arrive"]


def test_a_name_and_a_password_in_a_url_are_said_in_the_header(telling, hook):
    assert sent(telling(urls=[f"http://me:a%2Fb@127.0.0.1:{hook.port}/x"])) == []
    assert hook.asked == ["/x"] and hook.logins == ["Basic " + base64.b64encode(b"me:a/b").decode()]


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed(telling, hook, status):
    hook.replies = [status] * 10
    [(_, facts)] = sent(telling(urls=[f"{hook.url}/here"]))
    assert "redirect" in facts["failing"][hook.url] and set(hook.asked) == {"/here"}


def test_what_the_server_refuses_for_good_is_not_sent_twice(telling, hook):
    hook.replies = [404]
    [(_, facts)] = sent(telling(urls=[hook.url]))
    assert facts["failing"] == {hook.url: "HTTP 404"} and len(hook.asked) == 1


def test_a_target_that_is_not_there_or_hangs_holds_up_neither_who_tells_nor_the_other_targets(
    telling, hook, monkeypatch
):
    monkeypatch.setattr(notification_targets, "REPLY_S", 30.0)
    with serving() as slow:
        slow.slow_s = 20.0
        dead = f"http://127.0.0.1:{refusing_port()}"
        made = telling(urls=[slow.url, dead, hook.url])
        began_s = time.monotonic()
        made.tell(FINISHED)
        assert time.monotonic() - began_s < 15.0
        wait_until(lambda: hook.got)
        wait_until(lambda: not made._note.empty())
        assert made._note.get()[1]["failing"] == {dead: "Connection refused"}
        assert made.is_busy, "the slow one still waits for its answer"
        began_s = time.monotonic()
        made.stop()
        assert time.monotonic() - began_s < 15.0


@pytest.mark.parametrize("is_command", [True, False])
def test_what_has_not_arrived_at_the_end_is_noted(telling, hook, tmp_path, is_command):
    hook.slow_s = 30.0
    part = {"command": ["sleep", "30"]} if is_command else {"urls": [hook.url]}
    made = telling(**part)
    made.tell(FINISHED)
    made.tell(FINISHED)
    made.hurry()
    made.stop()
    kind, facts = made._note.get_nowait()
    assert kind == "notices_failed" and list(facts["failing"].values()) == [notifications.LATE]
    assert facts["event"] == "finished" and made._note.empty()


def test_a_flood_is_bounded_and_an_end_outlives_the_saves_before_it(tmp_path, hook, monkeypatch):
    monkeypatch.setattr("kgorch.core.session.notification_policy.MIN_INTERVAL_S", {})
    hook.slow_s = 0.3
    made = Notifier(NotifySection(on=["finished", "saved"], urls=[hook.url]), "ink", tmp_path, Notes())
    made.tell(FINISHED)
    for step in range(notifications.QUEUE_LENGTH + 20):
        made.tell(Notice(("saved",), "", {"step": step}))
    assert made._note.get()[1]["event"] == "saved"
    hook.slow_s = 0.0
    wait_until(lambda: not made.is_busy)
    made.stop()
    assert hook.events[0] == "finished" and len(hook.got) <= notifications.QUEUE_LENGTH + 2
    assert hook.got[-1]["step"] == notifications.QUEUE_LENGTH + 19, "the newest save is told"


def test_a_command_is_told_by_words_environment_and_standard_input(telling, tmp_path):
    text = "import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ), json.load(sys.stdin)], open('told.json', 'w'))"
    command = [*script(tmp_path, text), "{title}", "{text} $(id) {event}", "${PLACE}"]
    assert sent(telling(command=command, environ={**os.environ, "PLACE": "desk"}), step=7) == []
    words, environ, body = json.loads((tmp_path / "told.json").read_text())
    assert words == ["kgorch: ink finished at step 7", "the run is finished $(id) finished", "desk"]
    assert environ["KGORCH_EVENT"] == "finished" and environ["KGORCH_RUN"] == "ink"
    assert environ["KGORCH_STEP"] == "7" and environ["KGORCH_TEXT"] == body["text"]


def test_what_is_told_is_given_no_variable_and_reaches_a_command_whatever_is_in_it(telling, tmp_path):
    text = "import json, sys\njson.dump([sys.argv[1:], json.load(sys.stdin)], open('told.json', 'w'))"
    why = "KeyError: ${TOKEN} {run} \0 " + 200_000 * "x"
    made = telling(command=[*script(tmp_path, text), "{text}"], environ={**os.environ, "TOKEN": SECRET})
    assert sent(made, Notice(("finished",), why)) == []
    [word], body = json.loads((tmp_path / "told.json").read_text())
    assert word.startswith("KeyError: ${TOKEN} {run} ? xxx") and body["text"] == why


def test_a_command_that_fails_is_tried_again(telling, tmp_path):
    text = "import os, sys\nopen('tries', 'a').write('x')\nsys.exit(os.path.getsize('tries') < 3)"
    assert sent(telling(command=script(tmp_path, text))) == []
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_command_that_is_not_there_is_noted_and_not_tried_again(telling):
    [(_, facts)] = sent(telling(command=["/no/such/program"]))
    assert facts["failing"] == {"command": "cannot be run: No such file or directory"}


def test_a_command_that_does_not_end_is_killed_with_what_it_started(telling, tmp_path, monkeypatch):
    monkeypatch.setattr(notification_targets, "COMMAND_S", 3.0)
    monkeypatch.setattr(notifications, "TRIES", 1)
    text = "import subprocess, time\np = subprocess.Popen(['sleep', '600'])\nopen('pid', 'w').write(str(p.pid))\ntime.sleep(600)"
    made = Notifier(NotifySection(on=["finished"], command=script(tmp_path, text)), "ink", tmp_path, Notes())
    [(_, facts)] = sent(made)
    assert facts["failing"] == {"command": "ran for 3 s and was killed"}
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: process_identity.start_ticks(pid) is None)


def test_apprise_reaches_what_it_knows(telling, hook):
    pytest.importorskip("apprise")
    assert sent(telling(urls=[f"json://127.0.0.1:{hook.port}/{SECRET}"])) == []
    [body] = hook.got
    assert body["title"] == "kgorch: ink finished" and "finished" in body["message"]
    hook.replies = [500] * 20
    [(_, facts)] = sent(telling(urls=[f"json://127.0.0.1:{hook.port}/{SECRET}"]))
    assert facts["failing"] == {"json://…": "Apprise could not deliver it"}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"urls": ["https://h/${NO_SUCH}"]}, "notify.urls[0]: the environment has no NO_SUCH"),
        ({"command": ["x", "${NO_SUCH}"]}, "notify.command[1]: the environment has no NO_SUCH"),
        ({"urls": ["nosuchservice://host/path"]}, "Apprise does not accept this nosuchservice://"),
        ({"urls": ["https:///path"]}, "expected https://HOST"),
    ],
)
def test_a_target_that_can_never_be_told_is_refused_at_the_start(part, said):
    with pytest.raises(PlanError) as caught:
        notifications.check(NotifySection(**part), {})
    assert said in str(caught.value)


def test_without_apprise_its_urls_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    notifications.check(NotifySection(urls=["https://h/x"]))
    with pytest.raises(PlanError, match=r"pip install 'kgorch\[notify\]'"):
        notifications.check(NotifySection(urls=["discord://1/2"]))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://hooks.example.org:8443/T/s3cr3t?k=s3cr3t", "https://hooks.example.org:8443"),
        ("https://me:s3cr3t@host/x", "https://host"),
        ("https://host/send/@s3cr3t", "https://host"),
        ("https://host?to=me@s3cr3t", "https://host"),
        ("tgram://s3cr3t/chat", "tgram://…"),
        ("${HOOK}", "${HOOK}"),
        ("${SCHEME}://s3cr3t", "${SCHEME}"),
        ("https://${HOST}/x", "https://…"),
    ],
)
def test_a_target_goes_by_what_is_no_secret(url, told):
    assert public_form(url) == told


def everything_written(kgorch) -> bytes:
    return b"".join(path.read_bytes() for path in kgorch.home.rglob("*") if path.is_file())


def test_a_training_tells_its_start_and_end_and_no_secret_is_written_anywhere(kgorch, hook):
    kgorch.extra_env |= {"HOOK": SECRET, "USER_TOKEN": SECRET}
    closed = refusing_port()
    urls = [f"{hook.url}/${{HOOK}}", f"http://me:${{USER_TOKEN}}@127.0.0.1:{closed}/${{HOOK}}"]
    extra = f'[notify]\non = ["started", "saved", "finished"]\nurls = {json.dumps(urls)}\n'
    plan = kgorch.plan(ranks=1, args={"epochs": 2, "sleep": 0}, extra=extra)
    done = kgorch("start", str(plan))
    assert hook.events == ["started", "saved", "finished"]
    assert hook.got[-1]["session"] == 1 and hook.got[-1]["step"] > 0 and hook.got[-1]["metrics"]
    assert set(hook.asked) == {f"/{SECRET}"}
    status = kgorch("status", "--json")
    assert (
        f"notices do not reach http://127.0.0.1:{closed}: Connection refused" in json.loads(status.stdout)["notices"][0]
    )
    said = done.stdout + done.stderr + status.stdout + kgorch("history", "--events").stdout
    assert SECRET not in said and SECRET.encode() not in everything_written(kgorch)


ON = 'on = ["resumed", "suspended", "cut_off", "finished", "failed"]'


@pytest.mark.parametrize(
    ("ranks_live", "expected"), [(True, ["finished"]), (False, ["cut_off", "resumed", "finished"])]
)
def test_an_end_without_a_supervisor_is_told_by_the_next_start(kgorch, hook, ranks_live, expected):
    args = {"epochs": 4, "sleep": 0.5}
    plan = kgorch.plan(args=args, every="1s", extra=f'[notify]\n{ON}\nurls = ["{hook.url}"]\n')
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(5)
    supervisor.kill()
    supervisor.wait()
    if not ranks_live:
        for pid in kgorch.pids().values():
            with contextlib.suppress(ProcessLookupError):  # the kernel ends it with its parent
                os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(kgorch.home), what="the training to end")
    assert hook.events == []
    kgorch("start", str(plan), "--set", "stage.train.args.sleep=0.0")
    assert hook.events == expected
    assert (hook.got[0]["run"], hook.got[0]["session"], hook.got[0]["stage"]) == ("test", 1, "train")
    assert hook.got[0]["step"] >= 5 and hook.got[0]["metrics"]
    assert kgorch.status()["state"] == "finished"
    kgorch("resume")
    assert hook.events == expected, "once"


@pytest.mark.soak
def test_a_hook_that_hangs_does_not_hold_the_sessions_end_up_for_long(kgorch):
    with serving() as slow:
        slow.slow_s = 120.0
        extra = f'[notify]\nurls = ["{slow.url}"]\n'
        plan = kgorch.plan(ranks=1, args={"epochs": 1, "sleep": 0}, extra=extra)
        supervisor = kgorch.background("start", str(plan))
        wait_until(lambda: kgorch.try_status().get("state") == "finished" or slow.asked, within_s=90)
        supervisor.wait(timeout=60)
        assert supervisor.returncode == 0 and kgorch.status()["state"] == "finished"


def test_an_end_by_sigterm_is_told_though_the_margin_is_longer_than_what_it_leaves(kgorch):
    """A container, a Slurm job or a unit that is stopped: half a minute, whatever the wall was to be."""
    extra = '[notify]\ncommand = ["sh", "-c", "sleep 3; echo \\"$0\\" >> told", "{event}"]\n'
    plan = kgorch.plan(ranks=1, args={"epochs": 100_000, "sleep": 0.05}, wall="4h", margin="2m", extra=extra)
    supervisor = kgorch.background("start", str(plan))
    kgorch.wait_for_step(3)
    supervisor.terminate()
    assert supervisor.wait(timeout=60) == 10
    assert (kgorch.folder / "told").read_text() == "suspended\n"


def test_a_variable_that_is_not_set_is_named_before_anything_starts(kgorch):
    plan = kgorch.plan(ranks=1, extra='[notify]\nurls = ["https://h.invalid/${NO_SUCH_HOOK}"]\n')
    assert "NO_SUCH_HOOK" in kgorch("start", str(plan), code=2).stderr
    assert not list(kgorch.home.glob("runs/*/*/plan.toml"))


def test_notify_test_tells_which_target_was_reached(kgorch, hook):
    closed = f"http://127.0.0.1:{refusing_port()}"
    plan = kgorch.plan(ranks=1, extra=f'[notify]\nurls = ["{hook.url}/a", "{closed}/b"]\n')
    told = json.loads(kgorch("notify", "test", str(plan), "--json", code=2).stdout)
    promised = json.loads((Path(__file__).parents[1] / "promises" / "notify.json").read_text())
    assert [{key: type(value).__name__ for key, value in item.items()} for item in told] == promised
    assert [(item["target"], item["arrived"]) for item in told] == [(hook.url, True), (closed, False)]
    assert hook.events == ["test"]
    assert "Connection refused" in kgorch("notify", "test", str(plan), code=2).stdout
    kgorch("notify", "test", str(plan), "--set", f'notify.urls=["{hook.url}"]')
    assert (
        "has no target of notifications"
        in kgorch("notify", "test", str(plan), "--set", "notify.urls=[]", code=2).stderr
    )
    (kgorch.home / "kgorch").mkdir(parents=True)
    (kgorch.home / "kgorch" / "config.toml").write_text(f'[notify]\nurls = ["{hook.url}/all"]\n')
    kgorch("notify", "test", str(kgorch.plan(ranks=1)))


def test_an_address_that_is_none_by_now_is_told_to_fail_and_breaks_nothing(telling):
    """A run that is taken over is told by the configuration as it is then, which nobody has checked."""
    [(kind, facts)] = sent(telling(urls=["https://[h/x"]))
    assert kind == "notices_failed" and list(facts["failing"].values()) == ["ValueError"]


def test_a_target_that_breaks_is_told_by_the_kind_of_its_error(monkeypatch, tmp_path):
    def broken(self, message):
        raise RuntimeError(f"cannot reach https://h/{SECRET}")

    monkeypatch.setattr(notification_targets.WebhookTarget, "send", broken)
    [outcome] = notifications.test(NotifySection(urls=[f"https://h/{SECRET}"]), "ink", tmp_path)
    assert outcome.why == "RuntimeError"
