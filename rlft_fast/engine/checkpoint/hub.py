"""An export as a repository of the Hugging Face Hub."""

from pathlib import Path

from rlft_fast.engine.checkpoint.export import OWN_FILES
from rlft_fast.errors import RunError, brief

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


class HubRepository:
    """A repository of models that exports are pushed to, with the token of ``hf auth login`` or ``HF_TOKEN``.

    Args:
        name: ``owner/name``.
        public: whether a new repository is public.

    Raises:
        ValueError: the name is none of a repository.
        RunError: the Hub is not reached, admits no repository of this name, or the repository holds files of other
            origin.
    """

    def __init__(self, name: str, *, public: bool = False) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        if name.count("/") != 1:
            raise ValueError(f"{name!r} is no repository of the Hub: give OWNER/NAME")
        self.name, self._api = name, HfApi()
        try:
            self._api.create_repo(name, private=not public, exist_ok=True)
            files = {*self._api.list_repo_files(name)} - {".gitattributes"}
        except HFValidationError as error:
            raise ValueError(f"{name!r} is no repository of the Hub: {brief(error)}") from error
        except Exception as error:  # the client's errors are those of its HTTP library, too
            raise self._refused(error) from error
        if files and OWN_FILES not in files:
            raise RunError(f"{name} on the Hub holds files that no export has written: name another repository")

    def push(self, folder: Path, message: str) -> str:
        """Makes a commit with the files of an export. Weights of an earlier export are removed by the same commit.

        Args:
            folder: of the export.
            message: of the commit.

        Returns:
            The address of the commit.

        Raises:
            RunError: the Hub did not take the files.
        """
        try:
            commit = self._api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=[*_WEIGHTS]
            )
        except Exception as error:
            raise self._refused(error) from error
        return str(commit.commit_url)

    def _refused(self, error: Exception) -> RunError:
        return RunError(
            f"the Hub does not take {self.name}: {brief(error).rstrip('. ')}. See hf auth login, and HF_TOKEN"
        )
