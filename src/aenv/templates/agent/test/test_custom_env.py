import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import custom_env
import pytest

from aenv import Context, Conversation, ModelError


class Model(BaseHTTPRequestHandler):
    """A model that says how many messages it was shown."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = f"{len(asked['messages'])} messages" if asked["model"] == "default" else None
        answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def model():
    with HTTPServer(("127.0.0.1", 0), Model) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_it_asks_for_the_order_and_remembers_it():
    conversation = Conversation()
    assert "Which order" in custom_env.support("hello", conversation, Context())
    assert custom_env.support("it is a17", conversation, Context()) == "Order A17 left the warehouse on Monday."
    assert "A17" in custom_env.support("and now?", conversation, Context())


def test_an_order_that_is_not_there():
    assert "no order Z99" in custom_env.support("Z99", Conversation(), Context())


def test_a_model_sees_the_conversation(model):
    messages = [{"role": "user", "content": "hello"}]
    assert custom_env.by_model(messages, {"MODEL_URL": model}) == "2 messages"


def test_a_model_that_says_nothing_is_no_answer(model):
    with pytest.raises(ModelError, match="without a text"):
        custom_env.by_model([], {"MODEL_URL": model, "MODEL_NAME": "mute"})


def test_a_model_that_is_not_there_is_no_answer():
    with pytest.raises(ModelError, match="did not answer"):
        custom_env.by_model([], {"MODEL_URL": "http://127.0.0.1:1/v1"})


def test_the_reward_reads_the_conversations():
    conversation = Conversation("mine")
    for message in ("hello", "it is A17"):
        answer = custom_env.support(message, conversation, Context())
        conversation.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
    assert custom_env.told("A17", [conversation]) == {"score": 0.9, "session": "mine"}
    assert custom_env.told("B42", [conversation])["score"] == 0.0
