# ruff: noqa
# fmt: off
from aenv import register_reward

@register_reward
def evaluate_code_quality(code: str, test_results: dict) -> dict:
    """
    Reward function for evaluating code quality.
    Comprehensive scoring based on test results, code length, and code standards.
    Args:
        code: Code string to evaluate
        test_results: Test result dictionary containing pass/fail statistics
    Returns:
        Dictionary containing score, feedback, and detailed information
    """
    score = 0.0
    feedback = []
    # Score based on test results
    if test_results.get("passed", 0) > 0:
        score += 0.5
        feedback.append("Tests passed")
    # Score based on code length
    if len(code) < 1000:
        score += 0.3
        feedback.append("Code concise")
    # Score based on code standards
    if "def " in code and "import " in code:
        score += 0.2
        feedback.append("Good structure")
    return {
        "score": score,
        "feedback": "; ".join(feedback),
        "details": test_results
    }
