"""OpenVINO GenAI's own `GenerationConfig.validate`: each case is the values that are set for each request."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import openvino_genai

    def verdict(values):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = 16
        try:
            for name, value in values.items():
                if not hasattr(config, name):
                    raise AttributeError(name)
                setattr(config, name, value)
            config.validate()
        except Exception as error:
            return {
                "accepted": False,
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}",
            }
        read = {name: getattr(config, name) for name in values}
        near = all(abs(read[name] - values[name]) < 1e-6 for name in values)
        return {"accepted": near, "read": read}

    cases = json.load(sys.stdin)
    verdicts = {name: verdict(values) for name, values in cases.items()}
    print(json.dumps({"version": openvino_genai.__version__, "verdicts": verdicts}))


if __name__ == "__main__":
    main()
