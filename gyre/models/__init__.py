"""Decoder models: what a folder in Hugging Face's layout describes and holds, and the forward pass over it.

| module | what |
| --- | --- |
| `architecture` | `config.json` as a decoder's shape, and back: Qwen2, Qwen3 and Llama |
| `tensor_names` | name and shape of every tensor of a checkpoint, and which of them make one parameter |
| `safetensors_files` | a folder's files, and where the tensors stand in each |
| `safetensors_folder` | the tensors of a folder, checked against its architecture |
| `first_weights` | what training begins with: a folder's weights, or some drawn from a seed |
| `saving` | a folder written |
| `decoder` | weights in memory, and the forward pass over them |
| `modules` | the same with parameters that are trained: language model and value model |

Engines serve what this room reads and trainers train it; both have their tensors' names, shapes and errors from here.
"""
