from tests.models.conftest import model, pipeline  # noqa: F401
