"""The samples of a job's steps as Parquet, by step, below the job's directory: written by the trainer, read by people.

| module | what it has |
| --- | --- |
| `columns` | which columns a sample has |
| `texts` | what tokens say |
| `table` | groups as a table |
| `right_answer` | the right answer, in what the data says of a prompt |
| `writer` | the thread that writes |
| `narrow` | what filters and sorts of a file |
| `thinning` | which steps go when there are too many bytes |
| `query` | which samples are asked for, and who answers |
| `files` | the reader |
| `held_out` | the reader of held-out answers, two versions side by side |

docs/samples.md describes the columns. pyarrow is imported where a file is made or read, and not before.
"""
