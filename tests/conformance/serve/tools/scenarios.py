"""The tools that the server scenarios call."""

import asyncio

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
TEXT = {"type": "text", "text": "Multiple content types test:"}
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": WAV, "mimeType": "audio/wav"}


def resource(uri, mime_type, text):
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": text}}


ANSWERS = {
    "test_simple_text": "This is a simple text response for testing.",
    "test_image_content": {"content": [IMAGE]},
    "test_audio_content": {"content": [AUDIO]},
    "test_embedded_resource": {
        "content": [resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")]
    },
    "test_multiple_content_types": {
        "content": [TEXT, IMAGE, resource("test://mixed-content-resource", "application/json", '{"test":"data"}')]
    },
    "json_schema_2020_12_tool": "checked",
    "test_header_tool": "done",
}


def answering(answer):
    def handler(ctx, input):
        return answer

    return handler


def fails(ctx, input):
    raise ValueError("This tool intentionally returns an error for testing")


async def progress(ctx, input):
    for done in (0, 50, 100):
        ctx.progress(done, 100)
        await asyncio.sleep(0.2)
    return "done"


handlers = {name: answering(answer) for name, answer in ANSWERS.items()}
handlers |= {"test_error_handling": fails, "test_tool_with_progress": progress}
