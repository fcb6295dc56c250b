"""AgentDojo's suites, tasks and attacks, and one episode in one of them."""
