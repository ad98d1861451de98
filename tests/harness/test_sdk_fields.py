"""Each field that the clients know has been thought about: it is used, ignored, or refused with a reason."""

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from libra_jax.harness.gateway import anthropic_messages, fields, openai_chat, openai_responses


@pytest.mark.parametrize(
    ("request_type", "params"),
    [
        (openai_chat.Completion, completion_create_params.CompletionCreateParamsBase),
        (openai_responses.ResponsesBody, response_create_params.ResponseCreateParamsBase),
        (anthropic_messages.MessagesBody, message_create_params.MessageCreateParamsBase),
        (anthropic_messages.MessagesBody, beta_message_create_params.MessageCreateParamsBase),
    ],
)
def test_every_field_of_a_client_is_decided(request_type: type[fields.RequestBody], params: type):
    decided = {*request_type.model_fields, *request_type.ignored, *request_type.hinted, *request_type.neutral}
    assert set(params.__annotations__) <= decided


@pytest.mark.parametrize(
    "request_type", [openai_chat.Completion, openai_responses.ResponsesBody, anthropic_messages.MessagesBody]
)
def test_no_field_is_decided_twice(request_type: type[fields.RequestBody]):
    groups = [set(request_type.model_fields), request_type.ignored, {*request_type.hinted}, {*request_type.neutral}]
    assert sum(map(len, groups)) == len(set.union(*groups))
