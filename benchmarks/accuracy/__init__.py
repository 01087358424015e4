"""The accuracy sweep: lm-eval through the proxy against one engine, on a model that errs when its KV is wrong."""
