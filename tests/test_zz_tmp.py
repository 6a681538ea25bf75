import copy, torch, torch.distributed as dist
from tests.launch import run_ranks
def f():
    n=dist.get_world_size(); g=dist.new_group(list(range(n)))
    out=[]
    for x in (g, dist.group.WORLD):
        try: c=copy.deepcopy(x); out.append((type(c).__name__, c is x, c.size()))
        except Exception as e: out.append(str(e)[:50])
    return out
def test_():
    print(run_ranks(1,f)); print(run_ranks(2,f))
