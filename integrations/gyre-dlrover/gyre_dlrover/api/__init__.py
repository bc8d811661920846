"""DLRover's unified API: `builder` describes a job, `runtime` is what its workers import."""
