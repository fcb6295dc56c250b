"""verifiers, both ways: environments of ours as tasksets of its, and its environments published as ours."""

from aenv.integrations.verifiers.publishing import publish as publish
from aenv.integrations.verifiers.tasksets import AenvEnv as AenvEnv
from aenv.integrations.verifiers.tasksets import AenvEnvConfig as AenvEnvConfig
from aenv.integrations.verifiers.tasksets import AenvTask as AenvTask
from aenv.integrations.verifiers.tasksets import AenvTaskset as AenvTaskset
from aenv.integrations.verifiers.tasksets import check as check
