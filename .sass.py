import sys, tempfile, pathlib, collections
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.schedule import make_schedule
from cute_kernels.gemm.experts.ranges.schedule import make_ranges, among_assignments
from cute_kernels.formats.weights import weight_format
from cute_kernels.runtime import default_cache
import tests.linear.machine_code as mc
mc.MMAS=(*mc.MMAS,'HMMA')
from tests.linear.machine_code import instructions, main_loop
from tools.resources import resource_report
def P(f,T=1,n=5760):
    return GroupedProblem(T*4,128,n,2880,-(-2880//max(64,f.group_size))*max(64,f.group_size),f,"bf16")
which=sys.argv[1:]
cfgs={}
for f in ("mxfp4","w4g32","w4g128"):
    p=P(weight_format(f))
    cfgs["stream_"+f]=make_schedule(p).config
    try: cfgs["assigned_"+f]=among_assignments(make_ranges(p),4).config
    except Exception as e: print(f,e)
cfgs={k:v for k,v in cfgs.items() if k in which}
arts=default_cache().artifacts([ExpertSpec(c) for c in cfgs.values()],"sm_90a")
for (name,c),a in zip(cfgs.items(),arts):
    (r,)=resource_report(a)
    ins=instructions(a.object_code, pathlib.Path(tempfile.mkdtemp()))
    loop=main_loop(ins)
    ops=collections.Counter(o.split('.')[0] for _,o,_ in loop)
    alu=sum(v for k,v in ops.items() if k in("LOP3","SHF","PRMT","IADD3","LEA","VIMNMX","ISETP","SEL","PLOP3","VIADD","IMNMX","FMNMX"))
    mm=sum(v for k,v in ops.items() if k in("HMMA","IGMMA"))
    codes=c.n_tiles*(c.block_k//16) if "stream" in name else c.n_tiles*c.chunk_k_blocks*(c.block_k//16)
    print(name,c.name,"regs",r.registers,"spill",r.spill_store_bytes,"loop",len(loop),"mma",mm,"per 256 codes:",round(len(loop)/codes,2),"ALU",round(alu/codes,2),dict(ops.most_common()))
    open(f"/tmp/{name}.sass","w").write("\n".join(str(x) for x in loop))
    pos=[i for i,(_,o,_) in enumerate(ins) if o.startswith(("STL","LDL"))]
    mm=[i for i,(_,o,_) in enumerate(ins) if o.startswith(mc.MMAS)]
    print("spill places",pos,"mma",mm[0],mm[-1],"of",len(ins))
    import re,subprocess
    from tests.linear.machine_code import cubins_in, find_tool
    p=pathlib.Path(tempfile.mkdtemp())/"k.cubin"; p.write_bytes(cubins_in(a.object_code)[0])
    t=subprocess.run([find_tool("nvdisasm"),"-c",str(p)],capture_output=True,text=True).stdout
    L=t.splitlines(); print([ (i,l.strip()[:90]) for i,l in enumerate(L) if re.search(r"\b(STL|LDL)",l)][:30], len(L), [i for i,l in enumerate(L) if "IGMMA" in l][:1])
