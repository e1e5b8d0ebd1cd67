// kernel_text.h: native/cuda/copy_pieces.cu as PTX, made by `make ptx`;
// the driver compiles it when a rail opens. Do not edit.
#pragma once

namespace asyncfabric::cuda {

inline constexpr char kKernelText[] = R"PTX(
.version 7.0
.target sm_75
.address_size 64

	// .globl	copy_pieces

.visible .entry copy_pieces(
	.param .u64 copy_pieces_param_0,
	.param .u32 copy_pieces_param_1
)
.maxntid 512, 1, 1
{
	.reg .pred 	%p<7>;
	.reg .b32 	%r<67>;
	.reg .b64 	%rd<27>;


	ld.param.u64 	%rd7, [copy_pieces_param_0];
	ld.param.u32 	%r14, [copy_pieces_param_1];
	mov.u32 	%r63, %ctaid.x;
	setp.ge.u32 	%p1, %r63, %r14;
	@%p1 bra 	$L__BB0_8;

	mov.u32 	%r15, %ntid.x;
	mul.lo.s32 	%r16, %r15, 3;
	shl.b32 	%r2, %r15, 2;
	mov.u32 	%r3, %nctaid.x;
	cvt.u64.u32 	%rd1, %r15;
	shl.b32 	%r17, %r15, 1;
	cvt.u64.u32 	%rd2, %r17;
	cvt.u64.u32 	%rd3, %r16;
	cvta.to.global.u64 	%rd4, %rd7;
	shl.b64 	%rd22, %rd2, 4;

$L__BB0_2:
	mul.wide.u32 	%rd8, %r63, 24;
	add.s64 	%rd9, %rd4, %rd8;
	ld.global.u64 	%rd5, [%rd9];
	ld.global.u64 	%rd6, [%rd9+8];
	ld.global.u64 	%rd10, [%rd9+16];
	shr.u64 	%rd11, %rd10, 4;
	cvt.u32.u64 	%r5, %rd11;
	mov.u32 	%r65, %tid.x;
	mad.lo.s32 	%r19, %r15, 3, %r65;
	setp.ge.u32 	%p2, %r19, %r5;
	@%p2 bra 	$L__BB0_5;

	mov.u32 	%r65, %tid.x;

$L__BB0_4:
	mul.wide.u32 	%rd20, %r65, 16;
	add.s64 	%rd12, %rd6, %rd20;
	// begin inline asm
	ld.global.cs.v4.u32 {%r20,%r21,%r22,%r23}, [%rd12];
	// end inline asm
	shl.b64 	%rd21, %rd1, 4;
	add.s64 	%rd13, %rd12, %rd21;
	// begin inline asm
	ld.global.cs.v4.u32 {%r24,%r25,%r26,%r27}, [%rd13];
	// end inline asm
	add.s64 	%rd14, %rd12, %rd22;
	// begin inline asm
	ld.global.cs.v4.u32 {%r28,%r29,%r30,%r31}, [%rd14];
	// end inline asm
	shl.b64 	%rd23, %rd3, 4;
	add.s64 	%rd15, %rd12, %rd23;
	// begin inline asm
	ld.global.cs.v4.u32 {%r32,%r33,%r34,%r35}, [%rd15];
	// end inline asm
	add.s64 	%rd16, %rd5, %rd20;
	// begin inline asm
	st.global.cs.v4.u32 [%rd16], {%r20,%r21,%r22,%r23};
	// end inline asm
	add.s64 	%rd17, %rd16, %rd21;
	// begin inline asm
	st.global.cs.v4.u32 [%rd17], {%r24,%r25,%r26,%r27};
	// end inline asm
	add.s64 	%rd18, %rd16, %rd22;
	// begin inline asm
	st.global.cs.v4.u32 [%rd18], {%r28,%r29,%r30,%r31};
	// end inline asm
	add.s64 	%rd19, %rd16, %rd23;
	// begin inline asm
	st.global.cs.v4.u32 [%rd19], {%r32,%r33,%r34,%r35};
	// end inline asm
	add.s32 	%r65, %r65, %r2;
	cvt.u32.u64 	%r52, %rd3;
	add.s32 	%r53, %r65, %r52;
	setp.lt.u32 	%p3, %r53, %r5;
	@%p3 bra 	$L__BB0_4;

$L__BB0_5:
	setp.ge.u32 	%p4, %r65, %r5;
	@%p4 bra 	$L__BB0_7;

$L__BB0_6:
	mul.wide.u32 	%rd26, %r65, 16;
	add.s64 	%rd25, %rd5, %rd26;
	add.s64 	%rd24, %rd6, %rd26;
	// begin inline asm
	ld.global.cs.v4.u32 {%r54,%r55,%r56,%r57}, [%rd24];
	// end inline asm
	// begin inline asm
	st.global.cs.v4.u32 [%rd25], {%r54,%r55,%r56,%r57};
	// end inline asm
	cvt.u32.u64 	%r62, %rd1;
	add.s32 	%r65, %r65, %r62;
	setp.lt.u32 	%p5, %r65, %r5;
	@%p5 bra 	$L__BB0_6;

$L__BB0_7:
	add.s32 	%r63, %r63, %r3;
	setp.lt.u32 	%p6, %r63, %r14;
	@%p6 bra 	$L__BB0_2;

$L__BB0_8:
	ret;

}
)PTX";

}  // namespace asyncfabric::cuda
